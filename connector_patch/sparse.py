"""Log lines about what can happen to every request: at most one a minute for each kind."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final

from vllm.logger import init_logger

from singleflight.core.stats import Reason

logger = init_logger(f"vllm.{__name__}")
EVERY_S: Final = 60.0


class Sparse:
    """Says when a line is due. Thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaid: Counter[Hashable] = Counter()
        self._said: dict[Hashable, float] = {}

    def due(self, kind: Hashable, events: int = 1) -> int:
        """Take note of so many events. If a line is due: all of this kind since the last one; otherwise 0."""
        now = self._clock()
        with self._lock:
            self._unsaid[kind] += events
            said = self._said.get(kind)
            if said is not None and now - said < self._every_s:
                return 0
            self._said[kind] = now
            return self._unsaid.pop(kind)


class FallBacks:
    """Says which followers fell back, by reason."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._sparse = Sparse(clock=clock)
        self._seen: Counter[Reason] = Counter()

    def look(self, fell_back: Counter[Reason]) -> None:
        """`fell_back`: the table's count, which only grows."""
        for reason, fresh in (fell_back - self._seen).items():
            if requests := self._sparse.due(reason, fresh):
                logger.warning(
                    "kv-singleflight: requests that fell back since the last such line, reason %s: %d.",
                    reason.value,
                    requests,
                )
        self._seen = Counter(fell_back)
