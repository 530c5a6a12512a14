"""What one caller holds while it is interested in a run of keys."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic

import anyio
import anyio.lowlevel

from ..stats import Outcome, Reason
from .errors import ERRORS, FlightError
from .load import K, Load, V, check_values, loading

if TYPE_CHECKING:
    from .group import FlightGroup


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
        "_around",
        "_cause",
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

    def __init__(self, group: FlightGroup[K, V], keys: tuple[K, ...], deadline: float | None) -> None:
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
        self._around = loading.get()
        self._own: dict[K, V] = {}  # from the fallback loader

    async def __aenter__(self) -> FlightHandle[K, V]:
        if self._parts is not None:
            raise RuntimeError("a flight is joined once; call join() again")
        self._parts = []
        now = anyio.current_time()
        if self._deadline is not None:
            self._deadline += now
        self._group._enter(self, now)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No await: a caller that is being cancelled cannot be interrupted half way out.
        self._group._leave(self)

    def __await__(self) -> Generator[Any, Any, dict[K, V]]:
        """The value of each key, in the order of `keys`; a new dict each time, but the same values for all.

        Raises:
            LoadFailed: the loader raised, and hand-overs are used up; `__cause__` has its exception.
            FlightTimeout: the deadline passed.
            FlightReset: the group was reset more often than hand-overs allow, or was left.
            RuntimeError: awaited before the block was entered, or undecided when it was left.
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
        if self._parts is None or self.outcome is Outcome.CANCELLED:
            raise RuntimeError("await a flight inside its `async with` block")
        if self.outcome is None:
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
            self._group._time_out(self)
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
