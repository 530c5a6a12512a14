"""One timer for the budgets of all loads, so that a hung load is overdue though nobody comes to notice."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import anyio

from .handle import Load

SLACK = 64
"""So many entries of loads that have ended are kept besides one for each that runs."""


class Budgets:
    """When the budget ends of each load that can be joined.

    `run` is one task for the life of a group. It sleeps until the earliest budget, and without a timer while
    there is none. A load that ends in time only leaves its entry, a time and a number, behind: the timer
    fires for nothing at most once a budget, and the usual load neither sets nor stops one.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []  # a heap of (time on the event loop's clock, generation)
        self._loads: dict[int, Load[Any, Any]] = {}
        self._alarm = anyio.CancelScope()

    def add(self, load: Load[Any, Any], ends: float) -> None:
        assert load.flight is not None
        self._loads[load.flight.generation] = load
        heapq.heappush(self._ends, (ends, load.flight.generation))
        self._alarm.deadline = min(self._alarm.deadline, ends)

    def remove(self, load: Load[Any, Any]) -> None:
        if load.flight is not None:
            self._loads.pop(load.flight.generation, None)
        if len(self._ends) > 2 * len(self._loads) + SLACK:
            self._ends = [entry for entry in self._ends if entry[1] in self._loads]
            heapq.heapify(self._ends)

    def take_due(self, now: float) -> list[Load[Any, Any]]:
        """The loads whose budget has ended; they are forgotten here. One comparison while there is none."""
        due = []
        while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._loads):
            _, generation = heapq.heappop(self._ends)
            if generation in self._loads:
                due.append(self._loads.pop(generation))
        return due

    async def run(self, end: Callable[[float], None]) -> None:
        """Call `end(now)` whenever a budget may have ended, until cancelled."""
        while True:
            with self._alarm:
                await anyio.sleep_forever()
            self._alarm = anyio.CancelScope()
            end(
                anyio.current_time()
            )  # fired a tick of the clock early: then nothing is due, and it fires again
            self._alarm.deadline = self._ends[0][0] if self._ends else math.inf
