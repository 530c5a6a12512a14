"""The anyio driver of the pending-block table: tasks, time and wake-ups; the table decides who joins what.

Every change of state is synchronous, so nothing can come between its steps and nothing needs a shield.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Generic, cast

import anyio
from anyio.abc import TaskGroup

from ..flight import Flight
from ..policy import Policy
from ..stats import Outcome, Reason
from ..table import Effect, Left, PendingBlockTable, Segment
from .handle import FlightHandle
from .load import K, Load, Loader, V, check_values, loading

log = logging.getLogger(__name__)


class _Phase(Enum):
    NEW = "not entered"
    OPEN = "open"
    CLOSING = "being left"
    CLOSED = "closed"


class FlightGroup(Generic[K, V]):
    """Callers that need the same keys at the same time share one run of the loader.

    Args:
        loader: called with the keys nobody is loading yet, once for each flight, in a task of the group.
            It may raise; it need not bound its time.
        fallback: called instead of raising, in the caller's own task and for it alone, with the keys
            that it did not get. It is not bounded by the deadline. Without it the caller sees the error.
        policy: deadlines, hand-overs, table bound. `max_handovers=0` shows the loader's first error to all.
        keep_running: let a load finish though nobody waits for it any more, so that later callers can join
            it; otherwise it is cancelled when its last caller leaves. Only while it can be joined: not past
            the policy's budget, not after a reset, and not when the group is left.

    Use it as an async context manager. Leaving it waits for the loads that somebody waits for and cancels
    the others; leaving it with an exception, or being cancelled, cancels all, and callers that still wait
    elsewhere get FlightReset. Not thread-safe; one event loop.
    """

    def __init__(
        self,
        loader: Loader[K, V],
        *,
        fallback: Loader[K, V] | None = None,
        policy: Policy | None = None,
        keep_running: bool = False,
    ) -> None:
        self.fallback = fallback
        self.keep_running = keep_running
        self._loader = loader
        self._table = PendingBlockTable(policy)
        self._running: dict[Load[K, V], None] = {}
        self._phase = _Phase.NEW
        self._abandoned = 0
        self._handovers = 0
        self._tasks: TaskGroup

    # -- for callers -------------------------------------------------------------------------------------

    def join(self, keys: Iterable[K], *, deadline: float | None = None) -> FlightHandle[K, V]:
        """`async with flights.join(keys) as flight:` be interested in the keys, then `await flight`.

        Args:
            keys: block hashes or anything hashable; repetitions count once.
            deadline: seconds from entering the block until `await` stops waiting, more than 0; `math.inf`
                for no limit. The default is the budget (`Policy`) for all keys of the flights it waits for,
                since a key is there when its whole flight is. A hand-over does not restart it.

        Raises TypeError for a lone string, ValueError for a wrong deadline; entering raises RuntimeError
        outside the group's context, and where a loader asks for a key that is being loaded around it.
        """
        if isinstance(keys, (str, bytes)):
            raise TypeError(f"keys has to be a collection of keys; for one key write [{keys!r}]")
        distinct = tuple(dict.fromkeys(keys))
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline: {deadline!r} is not accepted; give a number of seconds > 0")
        return FlightHandle(self, distinct, deadline)

    async def load(self, keys: Iterable[K], *, deadline: float | None = None) -> dict[K, V]:
        """Join, await and leave in one: the value of each key. Arguments and errors as in `join`."""
        async with self.join(keys, deadline=deadline) as flight:
            return await flight

    def reset(self) -> None:
        """What is being loaded is out of date: nobody gets it any more.

        Callers that wait are handed over to new loads, within the policy's bound, or see FlightReset; the
        old loads are cancelled. Values that have landed before stay with those who hold them.
        """
        self._check_open()
        waiting = self._release_all()
        self._hand_over(waiting, Reason.RESET, None)
        self._stop_unwanted(self._running)

    def snapshot(self) -> dict[str, Any]:
        """The table's counters and the driver's, JSON-ready; keys are what the counters count.

        `loading` and `pending` are of this moment: loads that run, keys that can be joined. `abandoned`
        loads, cancelled because nobody wanted them, are also in `failed`, unless the table was full.
        """
        return {
            **self._table.stats.snapshot(),
            "handovers": self._handovers,
            "abandoned": self._abandoned,
            "loading": len(self._running),
            "pending": len(self._table),
        }

    def __repr__(self) -> str:
        return f"<FlightGroup {self._phase.value} loads={list(self._running)!r} pending={len(self._table)}>"

    # -- context -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> FlightGroup[K, V]:
        if self._phase is not _Phase.NEW:
            raise RuntimeError("a group is entered once; make a new one")
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._phase = _Phase.OPEN
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is None:
            self._phase = _Phase.CLOSING
            self._stop_unwanted(self._running)
        else:
            self._close(error if isinstance(error, Exception) else None)
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # The body's own exception goes on as it was raised, not wrapped by a task group it knows
            # nothing of.
            if error is not None and group.exceptions == (error,):
                return False
            raise
        finally:
            self._close(None)

    def _check_open(self) -> None:
        if self._phase is not _Phase.OPEN:
            raise RuntimeError(f"the flight group is {self._phase.value}; join inside its `async with` block")

    def _close(self, cause: BaseException | None) -> None:
        """Nobody gets anything from here on."""
        self._phase = _Phase.CLOSED
        for handle in self._release_all():
            handle._settle(Outcome.FELL_BACK, Reason.RESET, cause)
            self._drop(handle)
        self._stop_unwanted(self._running)

    # -- what handles do ---------------------------------------------------------------------------------

    def _enter(self, handle: FlightHandle[K, V], now: float) -> None:
        self._check_open()
        if handle._around:
            found = map(self._table.find, handle.keys)
            if any(pending is not None and pending[0].leader in handle._around for pending in found):
                raise RuntimeError("a loader asked for a key that it is called for: it would wait for itself")
        self._plan(handle, handle.keys, now)
        if not handle.keys:
            handle._settle(Outcome.READY)

    def _leave(self, handle: FlightHandle[K, V]) -> None:
        handle._settle(Outcome.CANCELLED)
        self._stop_unwanted(self._drop(handle))

    def _time_out(self, handle: FlightHandle[K, V]) -> None:
        # A loop may fire a timer one tick of its clock early.
        now = max(anyio.current_time(), handle._deadline or 0)
        self._table.expire_one(handle, now)
        for load, _ in handle._parts or ():
            if load.leader is handle:
                self._table.expire_one(load, now)
        handle._settle(Outcome.FELL_BACK, Reason.DEADLINE)
        self._stop_unwanted(self._drop(handle))

    # -- joining -----------------------------------------------------------------------------------------

    def _plan(self, handle: FlightHandle[K, V], keys: Sequence[K], now: float) -> None:
        """Follow what is pending and lead the rest, in one load. Pending keys may lie anywhere in `keys`."""
        assert handle._parts is not None
        missing: list[K] = []
        segments: list[Segment] = []
        adopted: dict[Flight, list[K]] = {}
        for key in keys:
            found = self._table.find(key)
            if found is None:
                missing.append(key)
                continue
            flight, index = found
            adopted.setdefault(flight, []).append(key)
            last = segments[-1] if segments else None
            if last is not None and last.flight is flight and last.start + last.length == index:
                segments[-1] = Segment(flight, last.start, last.length + 1)
            else:
                segments.append(Segment(flight, index, 1))
        if handle._deadline is None:
            size = len(missing) + sum(len(flight.hashes) for flight in adopted)
            handle._deadline = now + self._table.budget_s(size)
        if segments:
            self._table.attach(handle, segments, now, deadline=handle._deadline)
            for flight, mine in adopted.items():
                handle._parts.append((cast("Load[K, V]", flight.leader), mine))
        if missing:
            load = Load(tuple(missing), handle)
            load.flight = self._table.lead(load, load.keys, load.keys, now)
            handle._parts.append((load, load.keys))
            self._running[load] = None
            self._tasks.start_soon(self._run, load, name=repr(load))

    def _hand_over(
        self, handles: list[FlightHandle[K, V]], reason: Reason, cause: BaseException | None
    ) -> None:
        """Released callers come back, in order: the first leads what is missing, the others attach to it.

        Done for them at once, without waking them, so that no other caller and no failed entry can be met
        in between (hazards H6, H8). Who has used up its bound is told. Does not stop loads that this leaves
        unwanted: until the last one is placed, it is not known which they are.
        """
        now = anyio.current_time()
        for handle in handles:
            assert handle._parts is not None
            assert handle._deadline is not None
            if handle._handovers < self._table.policy.max_handovers and now < handle._deadline:
                handle._handovers += 1
                self._handovers += 1
                parts, handle._parts = handle._parts, []
                again: list[K] = []
                for load, keys in parts:
                    if load.values is not None or (load.leader is handle and not load.ended):
                        handle._parts.append((load, keys))
                    else:
                        again += keys
                self._plan(handle, again, now)
            else:
                handle._settle(Outcome.FELL_BACK, reason, cause)
                self._drop(handle)

    # -- leaving -----------------------------------------------------------------------------------------

    def _drop(self, handle: FlightHandle[K, V]) -> list[Load[K, V]]:
        """Take back every reference of this caller; return the loads that it had one to."""
        self._table.leave(handle)
        loads = [load for load, _ in handle._parts or ()]
        for load in loads:
            if load.leader is handle:
                self._orphan(load)
        return loads

    def _orphan(self, load: Load[K, V]) -> None:
        load.leader = None
        self._table.leave(load)

    def _release_all(self) -> list[FlightHandle[K, V]]:
        """Discard every flight; return all callers that still want one, followers first."""
        handles = dict.fromkeys(_released(self._table.reset()))
        for load in self._running:
            if load.leader is not None:
                handles[load.leader] = None
                self._orphan(load)
        return list(handles)

    def _stop_unwanted(self, loads: Iterable[Load[K, V]]) -> None:
        """Cancel the loads that nobody waits for. They leave the table first: nobody joins a dying flight."""
        for load in list(loads):
            if load.ended or load.wanted:
                continue
            if (
                self.keep_running
                and self._phase is _Phase.OPEN
                and load.flight is not None
                and load.flight.joinable
            ):
                continue
            self._abandoned += 1
            self._end(load)
            if load.flight is not None:
                self._table.fail(load.flight.generation)
            load.scope.cancel()

    # -- loads -------------------------------------------------------------------------------------------

    async def _run(self, load: Load[K, V]) -> None:
        with load.scope:
            if load.ended:
                return  # abandoned before it began
            loading.set((*load.around, load))
            try:
                values = await self._loader(load.keys)
                check_values(load.keys, values)
            except Exception as error:
                self._failed(load, error)
            except anyio.get_cancelled_exc_class() as error:
                if load.ended:
                    raise
                if anyio.current_effective_deadline() == -math.inf:
                    self._close(None)  # the group is being cancelled, and its host has not been told yet
                    raise
                # Not from any scope around us: the loader awaited something that was cancelled.
                self._failed(load, error)
            except BaseException as error:
                # KeyboardInterrupt and its like end the group; tell the callers before it goes.
                if not load.ended:
                    self._failed(load, error, hand_over=False)
                raise
            else:
                self._landed(load, values)

    def _end(self, load: Load[K, V]) -> None:
        load.ended = True
        self._running.pop(load, None)

    def _landed(self, load: Load[K, V], values: Any) -> None:
        effects = (
            [] if load.flight is None else self._table.land(load.flight.generation, anyio.current_time())
        )
        if load.ended:
            return  # abandoned; the table has counted the late report
        self._end(load)
        load.values = values
        interested = _released(effects)
        if load.leader is not None:
            interested.append(load.leader)
        for handle in interested:
            # A caller may still wait for what it leads itself, or follow more than it leads.
            if handle._complete():
                handle._settle(Outcome.READY)

    def _failed(self, load: Load[K, V], error: BaseException, *, hand_over: bool = True) -> None:
        effects = self._table.fail(load.flight.generation) if load.flight is not None else []
        followers: list[FlightHandle[K, V]] = _released(effects)
        if not followers and load.leader is None:
            log.warning("%r failed, and nobody waits for it: %r", load, error)
        if load.ended:
            return
        self._end(load)
        affected = {part for handle in followers for part, _ in handle._parts or ()}
        if load.leader is not None:
            load.leader._settle(Outcome.FELL_BACK, Reason.LEADER_FAILED, error)
            affected.update(self._drop(load.leader))
        if hand_over:
            self._hand_over(followers, Reason.LEADER_FAILED, error)
        else:
            for handle in followers:
                handle._settle(Outcome.FELL_BACK, Reason.LEADER_FAILED, error)
                self._drop(handle)
        self._stop_unwanted(affected)


def _released(effects: Sequence[Effect]) -> list[Any]:
    """The handles that the table has let go. (What to publish is in the load itself.)"""
    return [effect.request for effect in effects if isinstance(effect, Left)]
