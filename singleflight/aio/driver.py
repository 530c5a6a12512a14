"""The anyio driver of the pending-block table: tasks, time and wake-ups; the table decides who joins what.

Every change of state is synchronous, so nothing can come between its steps and nothing needs a shield.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextvars import Context
from enum import Enum
from typing import Any, Generic, cast

import anyio
from anyio.abc import TaskGroup

from ..core.flight import Flight
from ..core.stats import Outcome, Reason
from ..core.table import Effect, Left, PendingBlockTable, Segment
from .budgets import Budgets
from .handle import FlightHandle, K, Load, Loader, V, check_no_cycle, check_values, loading
from .home import Home

log = logging.getLogger(__name__)


class Phase(Enum):
    NEW = "not entered"
    OPEN = "open"
    CLOSING = "being left"
    CLOSED = "closed"


class Driver(Generic[K, V]):
    """Which loads run, and which callers want them. `FlightGroup` has the options' meaning.

    Attributes:
        phase: only an open driver takes callers.
        running: the loads that have not ended, in the order in which they began.
        abandoned, handovers: counts for `FlightGroup.snapshot`.
    """

    def __init__(
        self,
        table: PendingBlockTable,
        loader: Loader[K, V],
        fallback: Loader[K, V] | None,
        keep_running: bool,
        deadline_factor: float,
        loader_context: Context | None,
    ) -> None:
        self.fallback = fallback
        self.phase = Phase.NEW
        self.running: dict[Load[K, V], None] = {}
        self.abandoned = 0
        self.handovers = 0
        self._table = table
        self._loader = loader
        self._keep_running = keep_running
        self._deadline_factor = deadline_factor
        self._loader_context = loader_context

    # -- what the group does -----------------------------------------------------------------------------

    def open(self, tasks: TaskGroup) -> None:
        """Loads run in `tasks`, which the current task has entered."""
        self._home = Home()
        self._tasks = tasks
        self._budgets = Budgets()
        self._timer = tasks.start_soon(self._budgets.run, self._end_budgets)
        self.phase = Phase.OPEN

    def left_elsewhere(self) -> str | None:
        """What is wrong if the current task is not the one that opened the driver."""
        self.check_loop()
        return self._home.left_elsewhere()

    def finish(self) -> None:
        """Only the loads that somebody waits for go on."""
        self.phase = Phase.CLOSING
        self._timer.cancel()
        self._stop_unwanted(self.running)

    def close(self, cause: BaseException | None) -> None:
        """Nobody gets anything from here on."""
        self.phase = Phase.CLOSED
        self._timer.cancel()
        for handle in self._release_all():
            handle._settle(Outcome.FELL_BACK, Reason.RESET, cause)
            self._drop(handle)
        self._stop_unwanted(self.running)

    async def give_up(self, cause: BaseException | None) -> None:
        """Close where the task group cannot be left, and wait until no loader runs any more."""
        tasks = [self._timer, *(load.task for load in self.running if load.task is not None)]
        self.close(cause)
        for task in tasks:
            await task.wait()

    def reset(self) -> None:
        self._check_open()
        waiting = self._release_all()
        self._hand_over(waiting, Reason.RESET, None)
        self._stop_unwanted(self.running)

    def check_loop(self) -> None:
        """RuntimeError in another event loop or thread."""
        if self.phase is not Phase.NEW:
            self._home.check_loop()

    def _check_open(self) -> None:
        if self.phase is not Phase.OPEN:
            raise RuntimeError(f"the flight group is {self.phase.value}; join inside its `async with` block")
        self._home.check_loop()

    # -- what handles do ---------------------------------------------------------------------------------

    def enter(self, handle: FlightHandle[K, V], now: float) -> None:
        self._check_open()
        self._end_budgets(now)
        self._check_no_cycle(handle, handle.keys)
        handle._parts = []
        if handle._deadline is not None:
            handle._deadline += now
        for load in handle._asked_by:
            load.asks[handle] = None
        self._plan(handle, handle.keys, now)
        if not handle.keys:
            handle._settle(Outcome.READY)

    def leave(self, handle: FlightHandle[K, V]) -> None:
        self.check_loop()
        handle._settle(Outcome.CANCELLED)
        for load in handle._asked_by:
            load.asks.pop(handle, None)
        self._stop_unwanted(self._drop(handle))

    def time_out(self, handle: FlightHandle[K, V]) -> None:
        # A loop may fire a timer one tick of its clock early.
        now = max(anyio.current_time(), handle._deadline or 0)
        self._table.expire_one(handle, now)
        for load, _ in handle._parts or ():
            if load.leader is handle:
                self._table.expire_one(load, now)
        handle._settle(Outcome.FELL_BACK, Reason.DEADLINE)
        self._stop_unwanted(self._drop(handle))

    # -- joining -----------------------------------------------------------------------------------------

    def _check_no_cycle(self, handle: FlightHandle[K, V], keys: Sequence[K]) -> None:
        if handle._asked_by:
            found = [pending[0].leader for key in keys if (pending := self._table.find(key)) is not None]
            check_no_cycle(cast("list[Load[K, V]]", found), handle._asked_by)

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
            own = self._deadline_factor * self._table.budget_s(len(keys))
            handle._deadline = now + min(self._table.budget_s(size), own)
        if segments:
            self._table.attach(handle, segments, now, deadline=handle._deadline)
            for flight, mine in adopted.items():
                handle._parts.append((cast("Load[K, V]", flight.leader), mine))
        if missing:
            load = Load(tuple(missing), handle)
            load.flight = self._table.lead(load, load.keys, load.keys, now)
            handle._parts.append((load, load.keys))
            self.running[load] = None
            if load.flight is not None:
                self._budgets.add(load, self._table.overdue_at(load.flight, now))
            context = handle._context if self._loader_context is None else self._loader_context
            load.task = self._tasks.create_task(self._run(load), name=repr(load), context=context.copy())

    def _hand_over(
        self, handles: list[FlightHandle[K, V]], reason: Reason, cause: BaseException | None
    ) -> None:
        """Released callers come back, in order: the first leads what is missing, the others attach to it.

        Done for them at once, without waking them, so that no other caller and no failed entry can be met
        in between (hazards H6, H8). Who has used up its bound is told. Does not stop loads that this leaves
        unwanted: until the last one is placed, it is not known which they are.
        """
        now = anyio.current_time()
        self._end_budgets(now)
        for handle in handles:
            assert handle._parts is not None
            assert handle._deadline is not None
            kept: list[tuple[Load[K, V], Sequence[K]]] = []
            again: list[K] = []
            for load, keys in handle._parts:
                if load.values is not None or (load.leader is handle and not load.ended):
                    kept.append((load, keys))
                else:
                    again += keys
            may = handle._handovers < self._table.policy.max_handovers and now < handle._deadline
            try:
                self._check_no_cycle(handle, again)
            except RuntimeError:  # what is pending by now waits for this caller
                may = False
            if may:
                handle._handovers += 1
                self.handovers += 1
                handle._parts = kept
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
        for load in self.running:
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
                self._keep_running
                and self.phase is Phase.OPEN
                and load.flight is not None
                and load.flight.joinable
            ):
                continue
            self.abandoned += 1
            self._end(load)
            if load.flight is not None:
                self._table.fail(load.flight.generation)
            load.scope.cancel()

    # -- loads -------------------------------------------------------------------------------------------

    def _end_budgets(self, now: float) -> None:
        """Nobody joins a load that is past its budget, and it stops if nobody waits for it."""
        outlived = []
        for load in self._budgets.take_due(now):
            assert load.flight is not None
            ends = self._table.overdue_at(load.flight, now)
            if ends > now:  # with `deadline_learned_factor` a budget may grow
                self._budgets.add(load, ends)
            else:
                outlived.append(load)
        self._stop_unwanted(outlived)

    async def _run(self, load: Load[K, V]) -> None:
        with load.scope:
            if load.ended:
                return  # abandoned before it began
            loading.set(load)
            try:
                values = await self._loader(load.keys)
                check_values(load.keys, values)
            except Exception as error:
                self._failed(load, error)
            except anyio.get_cancelled_exc_class() as error:
                if load.ended:
                    raise
                if anyio.current_effective_deadline() == -math.inf:
                    self.close(None)  # the group is being cancelled, and its host has not been told yet
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
        self.running.pop(load, None)
        self._budgets.remove(load)

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
