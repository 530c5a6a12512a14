"""What one caller holds while it is interested in a run of keys, and the calls that bring them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel

from ..core.flight import Flight
from ..core.stats import Outcome, Reason
from .errors import ERRORS, FlightError, shown

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Loader = Callable[[Sequence[K]], Awaitable[Mapping[K, V]]]
"""Called with keys that differ, in the caller's order; returns a value for each (more are ignored)."""


class Group(Protocol[K, V]):
    """What a handle asks of the group it belongs to."""

    fallback: Loader[K, V] | None

    def check_loop(self) -> None: ...

    def enter(self, handle: FlightHandle[K, V], now: float) -> None: ...

    def leave(self, handle: FlightHandle[K, V]) -> None: ...

    def time_out(self, handle: FlightHandle[K, V]) -> None: ...


class FlightHandle(Generic[K, V]):
    """One caller's reference to the loads that bring its keys; made by `FlightGroup.join`.

    Entering it joins: keys that are being loaded are followed, the others start to load at once. `await` it
    inside the block for the values. Leaving the block drops the reference, and with the last reference
    the load is cancelled.

    Attributes:
        keys: what the caller asked for, without repetitions.
        outcome: None while undecided, then exactly one of READY, FELL_BACK and CANCELLED.
        reason: why it fell back; None otherwise.
    """

    # One Future for each caller and not one for each flight: a caller waits for several flights at once,
    # and taking one waiter off a shared asyncio event costs a search through all the others.
    __slots__ = (
        "_asked_by",
        "_cause",
        "_context",
        "_deadline",
        "_future",
        "_group",
        "_handovers",
        "_own",
        "_parts",
        "keys",
        "outcome",
        "reason",
    )

    def __init__(self, group: Group[K, V], keys: tuple[K, ...], deadline: float | None) -> None:
        self.keys = keys
        self.outcome: Outcome | None = None
        self.reason: Reason | None = None
        self._group = group
        # Seconds from joining, None for the usual; once joined, a time on the event loop's clock.
        self._deadline = deadline
        self._parts: list[tuple[Load[K, V], Sequence[K]]] | None = None  # None: not joined yet
        self._future: anyio.Future[None] | None = None  # made by whoever has to wait
        self._cause: BaseException | None = None
        self._handovers = 0
        self._context: Context  # the caller's, once joined
        self._asked_by: tuple[Load[Any, Any], ...] = ()  # the loads whose loaders have entered or await it
        self._own: dict[K, V] = {}  # from the fallback loader

    async def __aenter__(self) -> FlightHandle[K, V]:
        if self._parts is not None:
            raise RuntimeError("a flight is joined once; call join() again")
        self._context = copy_context()
        inside = loading.get()
        self._asked_by = () if inside is None else (inside,)
        self._group.enter(self, anyio.current_time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No await: a caller that is being cancelled cannot be interrupted half way out.
        self._group.leave(self)

    def __await__(self) -> Generator[Any, Any, dict[K, V]]:
        """The value of each key, in the order of `keys`; a new dict each time, but the same values for all.

        Raises:
            LoadFailed: the loader raised, and hand-overs are used up; `__cause__` has its exception.
            FlightTimeout: the deadline passed.
            FlightReset: the group was reset more often than hand-overs allow, or was left.
            RuntimeError: awaited before the block was entered, undecided when it was left, in another event
                loop, or by a loader that it waits for.
            Exception: whatever the fallback loader raises, in a group that has one.
        """
        return self._values().__await__()

    @property
    def landed(self) -> dict[K, V]:
        """The values that are there by now, in the order of `keys`."""
        values = {
            key: load.values[key]
            for load, keys in self._parts or ()
            if load.values is not None
            for key in keys
        }
        values |= self._own
        return {key: values[key] for key in self.keys if key in values}

    async def _values(self) -> dict[K, V]:
        self._group.check_loop()
        if self._parts is None or self.outcome is Outcome.CANCELLED:
            raise RuntimeError("await a flight inside its `async with` block")
        if self.outcome is None:
            inside = loading.get()
            if inside is None or inside in self._asked_by:
                await self._wait()
            else:
                with asking(inside, self):
                    await self._wait()
        else:
            await anyio.lowlevel.checkpoint()
        values = self.landed
        if len(values) < len(self.keys):
            await self._fall_back([key for key in self.keys if key not in values])
            values = self.landed
        return values

    async def _wait(self) -> None:
        if self._future is None:
            self._future = anyio.Future()
        assert self._deadline is not None
        if self._deadline < math.inf:
            with anyio.CancelScope(deadline=self._deadline):
                await self._future.wait()
        else:
            await self._future.wait()
        if self.outcome is None:
            self._group.time_out(self)
        elif self.outcome is Outcome.CANCELLED:
            raise RuntimeError("the `async with` block was left while another task awaited its flight")

    async def _fall_back(self, keys: list[K]) -> None:
        assert self.reason is not None
        try:
            raise ERRORS[self.reason](keys) from self._cause
        except FlightError:
            if self._group.fallback is None:
                raise
            # Within the handler, so that what the fallback raises says what came before it.
            values = await self._group.fallback(keys)
            check_values(keys, values)
            self._own = {key: values[key] for key in keys}

    def _complete(self) -> bool:
        return self._parts is not None and all(load.values is not None for load, _ in self._parts)

    def _settle(
        self, outcome: Outcome, reason: Reason | None = None, cause: BaseException | None = None
    ) -> None:
        if self.outcome is None:
            self.outcome, self.reason, self._cause = outcome, reason, cause
            if self._future is not None:
                self._future.return_value = None

    def __repr__(self) -> str:
        state = "undecided" if self.outcome is None else (self.reason or self.outcome).value
        return f"<FlightHandle keys={len(self.keys)} {state}>"


class Load(Generic[K, V]):
    """A run of the loader for `keys`, and who still wants it.

    To the table it is the flight's leader, so that one caller may lead several flights (its own misses,
    and what it takes over after a failure) and may leave without its load.

    Attributes:
        keys: what the loader is called with.
        leader: the caller whose misses these were, until it leaves.
        flight: its entry in the table; None if the table was full: then nobody can join.
        scope: cancelled when nobody wants the load any more.
        task: runs the loader.
        values: what the loader returned.
        asks: the handles that its loader has entered, or awaits, and not left.
        ended: landed, failed or abandoned. Whatever the loader still does after that changes nothing.
    """

    __slots__ = ("asks", "ended", "flight", "keys", "leader", "scope", "task", "values")

    def __init__(self, keys: tuple[K, ...], leader: FlightHandle[K, V]) -> None:
        self.keys = keys
        self.leader: FlightHandle[K, V] | None = leader
        self.flight: Flight | None = None
        self.asks: dict[FlightHandle[Any, Any], None] = {}
        self.scope = anyio.CancelScope()
        self.task: anyio.TaskHandle[None] | None = None
        self.values: Mapping[K, V] | None = None
        self.ended = False

    @property
    def wanted(self) -> bool:
        return self.leader is not None or (self.flight is not None and bool(self.flight.followers))

    def __repr__(self) -> str:
        state = "unregistered" if self.flight is None else f"#{self.flight.generation}"
        return f"<Load {state} keys={len(self.keys)}{' ended' if self.ended else ''}>"


loading: ContextVar[Load[Any, Any] | None] = ContextVar("singleflight_loading", default=None)
"""The load whose loader the current code is part of."""


def check_no_cycle(loads: Iterable[Load[Any, Any]], asked_by: Iterable[Load[Any, Any]]) -> None:
    """RuntimeError if a loader, of a load in `asked_by`, would wait for itself by waiting for one of `loads`.

    A load waits for another while its loader, or a task that the loader has started, holds an undecided
    handle on it. Every such step is checked when it is added, so there is never a cycle to walk in.
    """
    goals = {load for load in asked_by if not load.ended}
    if not goals:
        return
    came_from: dict[Load[Any, Any], Load[Any, Any] | None] = {load: None for load in loads if not load.ended}
    ahead = list(came_from)
    while ahead:
        load = ahead.pop()
        if load in goals:
            raise RuntimeError(_cycle(load, came_from))
        for handle in load.asks:
            if handle.outcome is None:
                for further, _ in handle._parts or ():
                    if not further.ended and further not in came_from:
                        came_from[further] = load
                        ahead.append(further)


def _cycle(asks: Load[Any, Any], came_from: Mapping[Load[Any, Any], Load[Any, Any] | None]) -> str:
    cycle = [asks]
    while (before := came_from[cycle[0]]) is not None:
        cycle.insert(0, before)
    who = f"the loader of {shown(asks.keys)} asked for a key"
    if len(cycle) == 1:
        return f"{who} that it is called for: it would wait for itself"
    chain = ", which wait for ".join(shown(load.keys) for load in cycle)
    return f"{who} of {chain}: it would wait for itself"


@contextmanager
def asking(inside: Load[Any, Any], handle: FlightHandle[Any, Any]) -> Iterator[None]:
    """The loader of `inside` awaits this handle, which was entered elsewhere."""
    check_no_cycle((load for load, _ in handle._parts or ()), (inside,))
    handle._asked_by += (inside,)
    inside.asks[handle] = None
    try:
        yield
    finally:
        handle._asked_by = tuple(load for load in handle._asked_by if load is not inside)
        inside.asks.pop(handle, None)


def check_values(keys: Sequence[K], values: Mapping[K, V]) -> None:
    """KeyError or TypeError, so that a loader that forgets a key has failed and hands out no half result."""
    if not isinstance(values, Mapping):
        raise TypeError(
            f"the loader returned {type(values).__name__}; it has to return a mapping key -> value"
        )
    for key in keys:
        if key not in values:
            raise KeyError(f"the loader returned no value for {key!r}")
