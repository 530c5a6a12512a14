"""One configuration of the trace model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from singleflight.traces.request import MAX_TIMESTAMP_MS

Routing = Literal["round_robin", "affinity"]
Lookup = Literal["contiguous_prefix", "independent_blocks"]
Phase = Literal["warmup", "steady"]

ROUTINGS: tuple[Routing, ...] = get_args(Routing)
LOOKUPS: tuple[Lookup, ...] = get_args(Lookup)
PHASES: tuple[Phase, ...] = get_args(Phase)

DEFAULT_WARMUP = (1, 10)
"""R2: steady from the first tenth of the span on."""

MAX_MS = MAX_TIMESTAMP_MS
"""Largest window, ms; t + W stays far inside int64."""

MAX_INSTANCES = 4096
MAX_CAPACITY = 2**31 - 2
"""The kernel counts cached blocks in int32."""


@dataclass(frozen=True, slots=True, order=True)
class Config:
    """A point of the grid.

    Attributes:
        w_eff_ms: W, how long a load takes, ms of trace time; 1 to 2**53. Replaying a trace s times faster
            with a load time W is the same experiment as W x s.
        instances: N, serving instances; 1 to 4096.
        capacity: C, blocks each instance's LRU holds; 1 to 2**31 - 2.
        routing: R3, ``round_robin`` or ``affinity``.
        lookup: R9, ``contiguous_prefix`` or ``independent_blocks``.
        warmup: R2, the warmup share as (numerator, denominator); (0, 1) means no warmup.

    Raises:
        ValueError: a value out of range; says which, and what is accepted.
    """

    w_eff_ms: int
    instances: int
    capacity: int
    routing: Routing = "round_robin"
    lookup: Lookup = "contiguous_prefix"
    warmup: tuple[int, int] = DEFAULT_WARMUP

    def __post_init__(self) -> None:
        _whole("window", self.w_eff_ms, 1, MAX_MS)
        _whole("instances", self.instances, 1, MAX_INSTANCES)
        _whole("capacity", self.capacity, 1, MAX_CAPACITY)
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing {self.routing!r}; accepted: {', '.join(ROUTINGS)}")
        if self.lookup not in LOOKUPS:
            raise ValueError(f"lookup {self.lookup!r}; accepted: {', '.join(LOOKUPS)}")
        num, den = self.warmup
        if not 0 <= num <= den or not 1 <= den <= 1_000_000:
            raise ValueError(
                f"warmup {num}/{den}; accepted: NUM/DEN with 0 <= NUM <= DEN, 1 <= DEN <= 1000000"
            )

    def as_json(self) -> dict[str, Any]:
        """The configuration with the names every report uses."""
        return {
            "w_eff_ms": self.w_eff_ms,
            "instances": self.instances,
            "capacity": self.capacity,
            "routing": self.routing,
            "lookup": self.lookup,
            "warmup": list(self.warmup),
        }


def _whole(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} {value!r}; accepted: a whole number from {low} to {high}")


def steady_from(first_ms: int, last_ms: int, warmup: tuple[int, int]) -> int:
    """The smallest t (ms) that is steady: ``den * (t - first) >= num * (last - first)``, exactly (R2)."""
    num, den = warmup
    return first_ms + -(-num * (last_ms - first_ms) // den)
