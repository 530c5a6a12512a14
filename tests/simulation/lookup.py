"""The scheduler side's way to ask the store: the real worker's lookup, without sockets and threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .worker import Worker

ASYNC_S = 0.015
"""An asynchronous lookup is asked again in the next step, and in most cases ready in the one after."""


class Lookup:
    """Stands for `LookupKeyClient`. An answer is the store's of when it was asked: it may be out of date."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.worker: Worker | None = None
        self.wipe: Callable[[], bool] = lambda: True
        self.futures: dict[str, Future[Any]] = {}
        self._asked: dict[str, float] = {}
        self.count = 0

    def lookup(
        self, req_id: str, num_tokens: int, block_hashes: Sequence[Any], non_block: bool = False
    ) -> Any:
        assert self.worker is not None
        if req_id not in self.futures:
            self.count += 1
            future: Future[Any] = Future()
            future.set_result(self.worker.lookup(num_tokens, list(block_hashes)))
            self.futures[req_id] = future
            self._asked[req_id] = self._clock()
        if non_block and self._clock() < self._asked[req_id] + ASYNC_S:
            return None
        return self.futures.pop(req_id).result()

    def discard(self, req_id: str) -> None:
        self.futures.pop(req_id, None)

    def reset(self) -> bool:
        return self.wipe()

    def close(self) -> None:
        """Nothing is open."""
