"""Retrieves of a real LMCache server that end as a test says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from connector_patch.lab.lmcache_bed import lmcache_of

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine


class _ToldToHaveFailed:
    """The future of a real retrieve; the server is said not to have had it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def query(self) -> bool:
        return bool(self._real.query())

    def result(self, timeout: float | None = None) -> bool:
        self._real.result(timeout=timeout)
        return False


@contextlib.contextmanager
def failing(engine: Engine, who: Callable[[str], bool]) -> Iterator[None]:
    """In the block, retrieves of these requests (by their ids) write what they should, and are said to
    fail."""
    worker = lmcache_of(engine.worker_connector)
    assert worker is not None
    transfer: Any = worker.worker_adapter.transfer_ctx
    real = transfer.submit_retrieve

    def submit(request_id: str, *args: Any, **named: Any) -> Any:
        future = real(request_id, *args, **named)
        return _ToldToHaveFailed(future) if who(request_id) else future

    transfer.submit_retrieve = submit
    try:
        yield
    finally:
        transfer.submit_retrieve = real
