"""What coalescing saves and what it costs, in one unit: request-seconds of waiting a second of real time.

Every formula is here, with its units; docs/gate.md says why each is as it is. Where one had to be simple,
it errs towards "no".
"""
# ruff: noqa: RUF009 - _figure makes a dataclasses.field

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from singleflight.quantity import Origin, Quantity
from singleflight.strict import Refused

SATURATED = 0.95
"""Utilization beyond which the queue's length is no longer a matter of its average; it is cut off here."""


def _figure(value: float, unit: str, low: float = 0.0, high: float = 1e18) -> Any:
    return field(
        default=Quantity(value, unit, Origin.DEFAULT), metadata={"unit": unit, "low": low, "high": high}
    )


@dataclass(frozen=True)
class Figures:
    """The cost model's input; a field that nobody sets is a default, and says so.

    Raises:
        Refused: another unit than the field's, or a value out of range.
    """

    load_latency: Quantity = _figure(0.005, "s")
    """From the Get to its first byte. A few milliseconds, TCP or RDMA with a master to ask."""

    load_bandwidth: Quantity = _figure(5e9, "bytes/s", low=1.0)
    """What one Get then brings. Under half of a 100 Gbit/s link."""

    parallel_loads: Quantity = _figure(1.0, "ratio", low=1.0, high=1024)
    """How many times more bytes a second all receive threads bring than one. vLLM's default is one thread."""

    kv_bytes_per_token: Quantity = _figure(131_072, "bytes/token", low=1.0)
    """32 layers, 8 KV heads of 128, keys and values in 16 bits (Llama 3.1 8B)."""

    coordination_per_lookup: Quantity = _figure(30e-6, "s/request")
    """Scheduler time the layer adds to each request, blocks apart. `singleflight calibrate` measures it; the
    default is over three times what it found on a 2-core cloud machine."""

    coordination_per_block: Quantity = _figure(4e-6, "s/block")
    """And to each block that is loaded from outside; likewise."""

    stalled_requests: Quantity = _figure(16.0, "requests", low=1.0)
    """How many requests wait while one scheduler works: what an instance typically serves at once."""

    follower_wait: Quantity = _figure(0.01, "s/follower")
    """How much later than its own load would have ended a follower goes on: half an engine step or so, and
    the rest of a leader's load that is longer than its own."""

    timeout_probability: Quantity = _figure(1e-4, "ratio", high=1.0)
    """Followers whose deadline passes."""

    timeout_wait: Quantity = _figure(10.0, "s/follower")
    """What that costs it: the deadline (`Policy.deadline_base_s`)."""

    owner_failure_probability: Quantity = _figure(1e-3, "ratio", high=1.0)
    """Followers whose leader's load fails, so that they start again, a load later."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            quantity, limits = getattr(self, each.name), each.metadata
            if quantity.unit != limits["unit"]:
                raise Refused(f'{each.name}.unit: "{quantity.unit}" is not accepted; give "{limits["unit"]}"')
            if not limits["low"] <= quantity.value <= limits["high"]:
                raise Refused(
                    f"{each.name}.value: {quantity.value:g} is not accepted;"
                    f" give a number from {limits['low']:g} to {limits['high']:g}"
                )

    def given(self, **values: float) -> Figures:
        """With these values, given by a person. Raises as the class does."""
        return self._with(Origin.GIVEN, values)

    def measured(self, **values: float) -> Figures:
        """With these values, measured. Raises as the class does."""
        return self._with(Origin.MEASURED, values)

    def _with(self, origin: Origin, values: dict[str, float]) -> Figures:
        units = {each.name: each.metadata["unit"] for each in dataclasses.fields(self)}
        return dataclasses.replace(
            self, **{name: Quantity(value, units[name], origin) for name, value in values.items()}
        )

    def as_dict(self) -> dict[str, Quantity]:
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def defaults(self) -> list[str]:
        """The names of those that nobody set."""
        return [name for name, quantity in self.as_dict().items() if quantity.origin is Origin.DEFAULT]


@dataclass(frozen=True)
class Load:
    """How long a load takes.

    Attributes:
        service_s: on its receive thread, s. wait_s: in the queue before it, s.
        utilization: of the load path, before it is cut off at `SATURATED`; above 1 loads come faster than
            they can be served.
    """

    service_s: float
    wait_s: float = 0.0
    utilization: float = 0.0

    @property
    def window_s(self) -> float:
        """W: from the request to the landed blocks, s."""
        return self.service_s + self.wait_s


def load(figures: Figures, run_blocks: float, block_tokens: int, loads_per_s: float) -> Load:
    """The load of a run of blocks on one instance.

        service = latency + run x block bytes / bandwidth
        utilization = loads/s x service / parallel
        wait = utilization x service / (2 x parallel x (1 - utilization))

    The wait is that of an M/D/1 queue (Pollaczek-Khinchine, constant service), with one server `parallel`
    times as fast.

    Args:
        run_blocks: blocks of a load. block_tokens: tokens a block. loads_per_s: of the instance, 1/s.
    """
    size = run_blocks * block_tokens * figures.kv_bytes_per_token.value
    service = figures.load_latency.value + size / figures.load_bandwidth.value
    parallel = figures.parallel_loads.value
    utilization = loads_per_s * service / parallel
    busy = min(utilization, SATURATED)
    return Load(service, busy * service / (2 * parallel * (1 - busy)), utilization)


@dataclass(frozen=True)
class Traffic:
    """What a simulation says of the steady phase, all instances together, a second of real time.

    Attributes:
        requests_per_s, cold_per_s, removable_per_s: requests; cold block loads; those removable.
        run_blocks: blocks of a leader's load, mean; at least 1.
    """

    requests_per_s: float
    cold_per_s: float
    removable_per_s: float
    run_blocks: float


@dataclass(frozen=True)
class Costs:
    """Request-seconds a second; see `costs`."""

    avoidable: float
    lost_parallelism: float
    coordination: float
    waits: float

    @property
    def saving(self) -> float:
        return self.avoidable - self.lost_parallelism

    @property
    def margin(self) -> float:
        """Above 0 it pays."""
        return self.saving - self.coordination - self.waits


def costs(figures: Figures, traffic: Traffic, service_s: float) -> Costs:
    """Both sides of the balance.

        avoidable    = cold loads/s x redundancy x cost per load,  cost per load = service / run
        lost         = avoidable x (1 - 1 / parallel)
        coordination = (requests/s x per lookup + cold loads/s x per block) x stalled requests
        waits        = followers/s x (follower wait + P(timeout) x deadline + P(owner fails) x service)

    A removed load counts as one request that need not wait for it. That is a lower bound: in a queue all
    behind it gain too. Loads in parallel would have overlapped, so of N removed ones only N / parallel were
    waited for. Followers are at most the removable blocks and at most the requests: an upper bound.

    Args:
        service_s: of one load, s, see `Load`.
    """
    avoidable = traffic.removable_per_s * service_s / traffic.run_blocks
    followers = min(traffic.removable_per_s, traffic.requests_per_s)
    bad_ends = (
        figures.timeout_probability.value * figures.timeout_wait.value
        + figures.owner_failure_probability.value * service_s
    )
    return Costs(
        avoidable=avoidable,
        lost_parallelism=avoidable * (1 - 1 / figures.parallel_loads.value),
        coordination=(
            traffic.requests_per_s * figures.coordination_per_lookup.value
            + traffic.cold_per_s * figures.coordination_per_block.value
        )
        * figures.stalled_requests.value,
        waits=followers * (figures.follower_wait.value + bad_ends),
    )
