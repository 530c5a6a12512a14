"""The link to the store: transfers share it evenly, and none is faster than one Get can be."""

from __future__ import annotations

import math


class Link:
    """Transfers in progress, each named by a number.

    Args:
        rate: what one transfer brings alone, bytes/s. parallel: how many times that several bring together.
    """

    def __init__(self, rate: float, parallel: float) -> None:
        self._rate = rate
        self._total = rate * parallel
        self._at = 0.0
        self._slowdown = 1.0
        # What each transfer would have been brought if it had run since the link was idle: all get the same,
        # so one number is kept for all, and for each the one at which it is complete.
        self._brought = 0.0
        self._complete_at: dict[int, float] = {}

    def start(self, name: int, size: float, now: float) -> None:
        """`size` bytes, more than 0; `now` is not earlier than any event before."""
        if self._complete_at:
            self._brought += (now - self._at) * self._speed()
        else:
            self._brought = 0.0
        self._at = now
        self._complete_at[name] = self._brought + size

    @property
    def busy(self) -> bool:
        return bool(self._complete_at)

    def next_end(self) -> tuple[float, int]:
        """When the next transfer is complete, and its name, the lowest of several at once; inf, -1: never."""
        if not self._complete_at:
            return math.inf, -1
        name = min(self._complete_at, key=lambda each: (self._complete_at[each], each))
        left = self._complete_at[name] - self._brought
        return self._at + max(left, 0.0) / self._speed(), name

    def end(self, name: int, now: float) -> None:
        """The transfer is complete, as `next_end` has said."""
        self._brought = self._complete_at.pop(name)
        self._at = now

    def slow(self, slowdown: float, now: float) -> None:
        """From now on all takes so many times longer; `now` is not earlier than any event before."""
        if self._complete_at:
            self._brought += (now - self._at) * self._speed()
            self._at = now
        self._slowdown = slowdown

    def _speed(self) -> float:
        n = len(self._complete_at)
        return (self._rate if n == 1 else min(self._rate, self._total / n)) / self._slowdown
