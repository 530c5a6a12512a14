"""What the scheduler side tells the worker, and what the worker adds to stock behaviour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
        KVCacheStoreRecvingThread,
        MooncakeStoreWorker,
    )

logger = init_logger(f"vllm.{__name__}")


class SingleFlightMetadata(MooncakeStoreConnectorMetadata):
    """The stock metadata of one step, and the requests that the worker must acknowledge.

    That it comes at all tells the worker that attach mode is on.
    """

    def __init__(self, stock: MooncakeStoreConnectorMetadata, acknowledge: Iterable[str]) -> None:
        super().__init__(stock.unfinished_request_ids, stock.preempted_req_ids)
        self.requests = stock.requests
        self.acknowledge = frozenset(acknowledge)


SHORT_READ = -1
"""What a Get that brought fewer bytes than asked is answered with; vLLM takes any negative number for a
failure. Mooncake's own codes for a failed key are below -100."""


class CheckedStore:
    """The store as receive threads see it: a short read is a failure, not a success.

    The stock receive thread takes any answer of 0 or more for a complete block; Mooncake answers a Get with
    the bytes it brought. Everything but the Get passes through.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        answers = self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
        return [
            SHORT_READ if 0 <= answer < sum(parts) else answer
            for answer, parts in zip(answers, sizes, strict=True)
        ]


def harden(worker: MooncakeStoreWorker) -> None:
    """Have every load end in a report, and every failed one as a request id. A second call does nothing.

    Reports by block id are not safe where loads in flight share blocks: the scheduler takes every block of
    an async load to belong to one request. So failures are reported as vLLM does it for hybrid models.
    """
    for thread in worker.kv_recv_threads:
        if not isinstance(thread.store, CheckedStore):
            thread._is_hma_required = True
            thread.store = CheckedStore(thread.store)
            _always_report(thread)


def _always_report(thread: KVCacheStoreRecvingThread) -> None:
    """An exception outside the stock thread's own `try`, or one that is no Exception (SystemExit), leaves
    the request unreported for ever, and the latter ends the thread. Here both are a failed load."""
    stock_handle, stock_finished = thread._handle_request, thread.set_finished_request
    reported = False

    def set_finished_request(request_id: str) -> None:
        nonlocal reported
        reported = True
        stock_finished(request_id)

    def handle(request: ReqMeta) -> None:
        nonlocal reported
        reported = False
        try:
            stock_handle(request)
        except BaseException:
            logger.exception("kv-singleflight: the load of request %s ended in an exception.", request.req_id)
            if not reported:
                thread.set_failed_request(request.req_id)
                stock_finished(request.req_id)

    thread.set_finished_request = set_finished_request  # type: ignore[method-assign, assignment]
    thread._handle_request = handle  # type: ignore[method-assign, assignment]


def acknowledged(
    results: KVConnectorTransferResults, metadata: SingleFlightMetadata
) -> KVConnectorTransferResults:
    """The step's results, with the acknowledgements the scheduler side asked for.

    Nothing calls the scheduler side back without worker output, so a request that waits without a load
    of its own can only be let go of through here. Every rank acknowledges; vLLM's aggregator waits for all.
    """
    if not metadata.acknowledge:
        return results
    return replace(results, finished_recving={*(results.finished_recving or ()), *metadata.acknowledge})
