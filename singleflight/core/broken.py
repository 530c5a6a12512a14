"""Keys that could not be read lately: a negative cache. No clock: the driver passes `now`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

MOST = 65_536
"""Keys remembered, the latest: some MB. A store that has lost more is the breaker's business."""


class BrokenKeys:
    """What the store claims to have and could not be read; each key is forgotten after a while.

    While it is empty, a question costs one `len`; otherwise a set operation over the keys asked about.

    Args:
        ttl_s: seconds that a key is remembered after its last failure; 0 remembers none.
        most: bound on keys; the oldest go first.
    """

    def __init__(self, ttl_s: float, most: int = MOST) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._until: dict[Hashable, float] = {}  # in the order in which they expire

    def __len__(self) -> int:
        """Keys remembered, those that are to be forgotten at the next question included."""
        return len(self._until)

    def failed(self, keys: Iterable[Hashable], now: float) -> None:
        """Exactly these keys could not be read, each by itself; not all of a load of which one is bad."""
        if not self._ttl_s:
            return
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = now + self._ttl_s
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def read(self, keys: Iterable[Hashable]) -> None:
        """These keys have been read."""
        if self._until:
            for key in keys:
                self._until.pop(key, None)

    def clear(self) -> None:
        """The store has been emptied."""
        self._until.clear()

    def first(self, keys: Sequence[Hashable], start: int, stop: int, now: float) -> int:
        """The index of the first broken key in keys[start:stop]; `stop` if there is none."""
        self._forget(now)
        if not self._until:
            return stop
        asked = keys[start:stop]
        if self._until.keys().isdisjoint(asked):
            return stop
        return start + next(i for i, key in enumerate(asked) if key in self._until)

    def _forget(self, now: float) -> None:
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                return
            del self._until[oldest]
