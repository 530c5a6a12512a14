"""What a caller of `singleflight.aio` works with: the group, its options, and how it is entered and left."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import Context
from types import TracebackType
from typing import Any, Generic

import anyio

from ..core.policy import Policy
from ..core.table import PendingBlockTable
from .driver import Driver, Phase
from .handle import FlightHandle, K, Loader, V


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
        deadline_factor: without a deadline of its own a caller waits for the loads that it has joined, but at
            most so many times the budget of its own keys. At least 1; `math.inf` for no such bound. 2: the
            budget itself is far above any healthy load, and a caller of few keys still gives up (20.1 s)
            before its clients do (30 s and more, hazard C4), however large and hung what it joined is.
        loader_context: the context variables that every load sees, each load a copy of its own;
            `contextvars.Context()` for none. Without it a load sees those of the caller that leads it.

    Use it as an async context manager, entered and left by one task. Leaving it waits for the loads that
    somebody waits for and cancels the others; leaving it with an exception, or being cancelled, cancels all,
    and callers that still wait elsewhere get FlightReset. Not thread-safe: in another event loop or thread
    everything but `snapshot` raises RuntimeError.
    """

    def __init__(
        self,
        loader: Loader[K, V],
        *,
        fallback: Loader[K, V] | None = None,
        policy: Policy | None = None,
        keep_running: bool = False,
        deadline_factor: float = 2.0,
        loader_context: Context | None = None,
    ) -> None:
        if not deadline_factor >= 1:
            raise ValueError(f"deadline_factor: {deadline_factor!r} is not accepted; give a number >= 1")
        if loader_context is not None and not isinstance(loader_context, Context):
            raise TypeError(f"loader_context: {loader_context!r} is not accepted; give a contextvars.Context")
        self._table = PendingBlockTable(policy)
        self._driver = Driver(self._table, loader, fallback, keep_running, deadline_factor, loader_context)

    # -- for callers -------------------------------------------------------------------------------------

    def join(self, keys: Iterable[K], *, deadline: float | None = None) -> FlightHandle[K, V]:
        """`async with flights.join(keys) as flight:` be interested in the keys, then `await flight`.

        Args:
            keys: block hashes or anything hashable; repetitions count once.
            deadline: seconds from entering the block until `await` stops waiting, more than 0; `math.inf`
                for no limit. The default is the budget (`Policy`) for all keys of the flights it waits for,
                since a key is there when its whole flight is, but at most `deadline_factor` times the budget
                of `keys`. A hand-over does not restart it.

        Raises TypeError for a lone string, ValueError for a wrong deadline; entering raises RuntimeError
        outside the group's context, in another event loop, and where a loader asks for a key that can only
        come when that loader has returned.
        """
        if isinstance(keys, (str, bytes)):
            raise TypeError(f"keys has to be a collection of keys; for one key write [{keys!r}]")
        distinct = tuple(dict.fromkeys(keys))
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline: {deadline!r} is not accepted; give a number of seconds > 0")
        return FlightHandle(self._driver, distinct, deadline)

    async def load(self, keys: Iterable[K], *, deadline: float | None = None) -> dict[K, V]:
        """Join, await and leave in one: the value of each key. Arguments and errors as in `join`."""
        async with self.join(keys, deadline=deadline) as flight:
            return await flight

    def reset(self) -> None:
        """What is being loaded is out of date: nobody gets it any more.

        Callers that wait are handed over to new loads, within the policy's bound, or see FlightReset; the
        old loads are cancelled. Values that have landed before stay with those who hold them.
        """
        self._driver.reset()

    def snapshot(self) -> dict[str, Any]:
        """The table's counters and the driver's, JSON-ready; keys are what the counters count.

        `loading` and `pending` are of this moment: loads that run, keys that can be joined. `abandoned`
        loads, cancelled because nobody wanted them, are also in `failed`, unless the table was full.
        """
        return {
            **self._table.stats.snapshot(),
            "handovers": self._driver.handovers,
            "abandoned": self._driver.abandoned,
            "loading": len(self._driver.running),
            "pending": len(self._table),
        }

    def __repr__(self) -> str:
        driver = self._driver
        loads = list(driver.running)
        return f"<FlightGroup {driver.phase.value} loads={loads!r} pending={len(self._table)}>"

    # -- context -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> FlightGroup[K, V]:
        if self._driver.phase is not Phase.NEW:
            raise RuntimeError("a group is entered once; make a new one")
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._driver.open(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        cause = error if isinstance(error, Exception) else None
        if (wrong := self._driver.left_elsewhere()) is not None:
            await self._driver.give_up(cause)
            if error is None or error is cause:
                raise RuntimeError(wrong)
            error.add_note(wrong)  # a cancellation has to go on
            return False
        if error is None:
            self._driver.finish()
        else:
            self._driver.close(cause)
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # The body's own exception goes on as it was raised, not wrapped by a task group it knows
            # nothing of.
            if error is not None and group.exceptions == (error,):
                return False
            raise
        finally:
            self._driver.close(None)
