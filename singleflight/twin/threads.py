"""The worker's receive threads: one queue, first come, first served, and a Get for each load.

As `KVCacheStoreRecvingThread` of vLLM 0.32: all keys of a load go into one `batch_get_into_multi_buffers`
(they are split only where Mooncake stages on disk), and a thread takes the next load when that has returned.
"""

from __future__ import annotations

import math
from collections import deque

from singleflight.twin.link import Link


class Get:
    """One Get. Attributes: request; blocks; queued_s, started_s, ended_s, reported_s as in `Gets`."""

    __slots__ = ("blocks", "ended_s", "queued_s", "reported_s", "request", "started_s")

    def __init__(self, request: int, blocks: int, queued_s: float) -> None:
        self.request = request
        self.blocks = blocks
        self.queued_s = queued_s
        self.started_s = self.ended_s = self.reported_s = math.inf


class Threads:
    """`count` threads over one link.

    Args:
        latency_s: from the Get to its first byte; the link is free meanwhile. block_bytes: of a block.
    """

    def __init__(self, count: int, latency_s: float, block_bytes: float, link: Link) -> None:
        self._latency_s = latency_s
        self._block_bytes = block_bytes
        self._link = link
        self._idle = list(range(count))
        self._queue: deque[Get] = deque()
        self._busy: dict[int, Get] = {}
        self._first_byte: dict[int, float] = {}  # of threads that wait for it
        self._ended: list[Get] = []

    def put(self, get: Get) -> None:
        """Queue it at its `queued_s`, which is not before any time given so far."""
        self._advance(get.queued_s)
        self._queue.append(get)
        self._take(get.queued_s)

    def ended(self, until: float) -> list[Get]:
        """The Gets that have ended by then and were not told yet, in order."""
        self._advance(until)
        told, self._ended = self._ended, []
        return told

    def transferring(self, now: float) -> bool:
        """Whether bytes come in."""
        self._advance(now)
        return self._link.busy

    def slow(self, slowdown: float, now: float) -> None:
        """From now on bytes take so many times longer to come in."""
        self._advance(now)
        self._link.slow(slowdown, now)

    def _advance(self, until: float) -> None:
        while (event := self._next_event()) <= until:
            end, thread = self._link.next_end()
            if end == event:
                self._link.end(thread, end)
                get = self._busy.pop(thread)
                get.ended_s = end
                self._ended.append(get)
                self._idle.append(thread)
                self._take(end)
            else:
                thread = min(self._first_byte, key=lambda each: (self._first_byte[each], each))
                del self._first_byte[thread]
                self._link.start(thread, self._busy[thread].blocks * self._block_bytes, event)

    def _next_event(self) -> float:
        return min(self._link.next_end()[0], min(self._first_byte.values(), default=math.inf))

    def _take(self, now: float) -> None:
        while self._queue and self._idle:
            thread = min(self._idle)
            self._idle.remove(thread)
            get = self._queue.popleft()
            get.started_s = now
            self._busy[thread] = get
            self._first_byte[thread] = now + self._latency_s
