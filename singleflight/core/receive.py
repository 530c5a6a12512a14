"""The receive queue: which loads are in the air, and when one more would have landed. No clock.

A driver has `lanes` threads that take loads first come first served and share one link. So the link brings
what is queued in that order, and a load behind it ends when all of it is there:

    seconds = seconds a block x (blocks before it + its own)  +  latency x (its turns to wait + 1)

Both prices are learned from what comes out of a queue that is not empty: so many blocks of so many loads, in
so many seconds. That holds for one lane as for many.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import NamedTuple

from .fit import Plane

VAGUE = 0.25
"""Loads start within a step and are reported at the end of one. Where the queue was empty before or after,
the link may have been idle for as long as that step; if that is more than this share of the time, the time
says nothing about the link."""

STALE_S = 30.0
"""Where nothing loads, nothing is learned: prices from a slow minute would keep everybody computing for ever.
A store node restarts in about that time."""

LOST_S = 600.0
"""A load that has not been reported for so long never will be: its thread is dead."""


class _Load(NamedTuple):
    blocks: int
    started: float


class ReceiveQueue:
    """The loads that a driver has started and not reported, registered as flights or not."""

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = lanes
        self._prices = Plane()
        self._air: dict[Hashable, _Load] = {}
        self._blocks = 0
        self._since = 0.0  # the link has worked for those in the air since then
        self._asked = 0.0  # the last report, of whatever
        self._doubt = 0.0  # seconds of the time since then in which it may have been idle
        self._filled = False  # since the last report, into an empty queue
        self._learned = 0.0  # when the prices were last looked at

    def __len__(self) -> int:
        return len(self._air)

    def add(self, load: Hashable, blocks: int, now: float) -> None:
        """A load of so many blocks, more than 0, is queued."""
        self._remove(load)
        while self._air and now - self._air[oldest := next(iter(self._air))].started >= LOST_S:
            self._remove(oldest)
        if not self._air:
            self._since = self._asked = now
            self._doubt, self._filled = 0.0, True
        self._air[load] = _Load(blocks, now)
        self._blocks += blocks

    def reported(self, loads: Collection[Hashable], now: float, *, failed: bool = False) -> None:
        """The end of a step: these loads, maybe none, have ended since the end of the last one.

        `failed`: one of them has, so how long they took says nothing.
        """
        before, self._asked = self._asked, now
        if self._filled:
            self._doubt, self._filled = now - self._since, False
        if not loads:
            return
        lanes = min(max(len(self._air), 1), self.lanes)
        found = [blocks for load in loads if (blocks := self._remove(load))]
        if not found:
            return
        busy = bool(self._air) and next(iter(self._air.values())).started <= before
        doubt = self._doubt if busy else self._doubt + now - before
        seconds = now - self._since
        if not failed and seconds > 0 and doubt <= VAGUE * seconds:
            self._prices.observe(sum(found), len(found) / lanes, seconds)
            self._learned = now
        self._since, self._doubt = now, 0.0

    def load_s(self, blocks: int, now: float) -> float | None:
        """Seconds from now until a load of so many blocks, queued now, would have landed; None while too
        little has been seen."""
        before = len(self._air)
        if before < self.lanes:  # a lane is idle: it shares the link with what is in the air
            queued = sum(min(load.blocks, blocks) for load in self._air.values()) if before else 0
            turns = 0.0
        else:
            queued, turns = self._blocks, before / self.lanes
        own = self._prices.seconds(blocks, 1)
        if own is None or not before:
            return own
        wait = self._prices.seconds(queued, turns)
        assert wait is not None
        # What takes longer than expected counts as about to land.
        return own + max(wait - (now - self._since), 0.0)

    def forgets(self, now: float) -> bool:
        """Somebody is about to compute since the prices say so. If nothing is in the air and they are old,
        they are forgotten: it loads, and so does everybody until enough has been seen again."""
        if self._air or now - self._learned <= STALE_S:
            return False
        self._prices = Plane()
        return True

    def landings(self, now: float) -> Iterator[tuple[Hashable, float]]:
        """When each of the loads in the air should land, in their order: seconds from now."""
        until = self._since - now
        lanes = min(max(len(self._air), 1), self.lanes)
        for name, load in self._air.items():
            until += self._prices.seconds(load.blocks, 1 / lanes) or 0.0
            yield name, max(until, 0.0)

    def _remove(self, load: Hashable) -> int:
        found = self._air.pop(load, None)
        if found is None:
            return 0
        self._blocks -= found.blocks
        return found.blocks
