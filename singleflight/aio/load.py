"""One call of the loader: what the core's `Flight` is to the table, a `Load` is to the driver."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from ..flight import Flight

if TYPE_CHECKING:
    from .handle import FlightHandle

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Loader = Callable[[Sequence[K]], Awaitable[Mapping[K, V]]]
"""Called with keys that differ, in the caller's order; returns a value for each (more are ignored)."""

loading: ContextVar[tuple[Load[Any, Any], ...]] = ContextVar("singleflight_loading", default=())
"""The loads that the current code runs inside of."""


class Load(Generic[K, V]):
    """A run of the loader for `keys`, and who still wants it.

    To the table it is the flight's leader, so that one caller may lead several flights (its own misses,
    and what it takes over after a failure) and may leave without its load.

    Attributes:
        keys: what the loader is called with.
        leader: the caller whose misses these were, until it leaves.
        flight: its entry in the table; None if the table was full: then nobody can join.
        scope: cancelled when nobody wants the load any more.
        values: what the loader returned.
        around: the loads that the leader itself ran inside of.
        ended: landed, failed or abandoned. Whatever the loader still does after that changes nothing.
    """

    __slots__ = ("around", "ended", "flight", "keys", "leader", "scope", "values")

    def __init__(self, keys: tuple[K, ...], leader: FlightHandle[K, V]) -> None:
        self.keys = keys
        self.leader: FlightHandle[K, V] | None = leader
        self.flight: Flight | None = None
        self.around = leader._around
        self.scope = anyio.CancelScope()
        self.values: Mapping[K, V] | None = None
        self.ended = False

    @property
    def wanted(self) -> bool:
        return self.leader is not None or (self.flight is not None and bool(self.flight.followers))

    def __repr__(self) -> str:
        state = "unregistered" if self.flight is None else f"#{self.flight.generation}"
        return f"<Load {state} keys={len(self.keys)}{' ended' if self.ended else ''}>"


def check_values(keys: Sequence[K], values: Mapping[K, V]) -> None:
    """KeyError or TypeError, so that a loader that forgets a key has failed and hands out no half result."""
    if not isinstance(values, Mapping):
        raise TypeError(
            f"the loader returned {type(values).__name__}; it has to return a mapping key -> value"
        )
    for key in keys:
        if key not in values:
            raise KeyError(f"the loader returned no value for {key!r}")
