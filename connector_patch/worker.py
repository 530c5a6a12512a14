"""What the scheduler side tells the worker, and what the worker adds to stock behaviour."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata
from vllm.logger import init_logger

from .partial import PartialLoads, blocks_there, first_block
from .sparse import Sparse

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
        MooncakeStoreWorkerMetadata,
        ReqMeta,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import KVCacheStoreRecvingThread

logger = init_logger(f"vllm.{__name__}")
_exceptions = Sparse()


class SingleFlightMetadata(MooncakeStoreConnectorMetadata):
    """The stock metadata of one step, and the requests that the worker must acknowledge.

    That it comes at all tells the worker that attach mode is on.

    Saves end where the hashes end. vLLM pads a request that has one token to compute with drafts
    (speculative decoding) and counts them in: it would save what is computed from them, under the hash of the
    tokens that come instead.
    """

    def __init__(
        self, stock: MooncakeStoreConnectorMetadata, acknowledge: Iterable[str], hash_block_size: int
    ) -> None:
        super().__init__(stock.unfinished_request_ids, stock.preempted_req_ids)
        self.requests = stock.requests
        self.acknowledge = frozenset(acknowledge)
        for request in self.requests:
            hashed = len(request.block_hashes) * hash_block_size
            request.token_len_chunk = min(request.token_len_chunk, hashed)


SHORT_READ = -1
"""What a Get that brought fewer bytes than asked is answered with; vLLM takes any negative number for a
failure. Mooncake's own codes for a failed key are below -100."""


LEASE_EXPIRED = -707
"""Mooncake's code for a key whose lookup was too long ago. It can be read after another lookup."""


class CheckedStore:
    """The store as one receive thread sees it: a short read is a failure, not a success.

    The stock receive thread takes any answer of 0 or more for a complete block; Mooncake answers a Get with
    the bytes it brought. Everything but the Get passes through.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._gets: list[tuple[list[str], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        answers = self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
        answers = [
            SHORT_READ if 0 <= answer < sum(parts) else answer
            for answer, parts in zip(answers, sizes, strict=True)
        ]
        self._gets.append((keys, answers))
        return answers

    def forget(self) -> None:
        """Another load begins."""
        self._gets.clear()

    def brought(self) -> set[str]:
        """The keys that have come in full since then."""
        return {key for key, answer in self._answers() if answer >= 0}

    def refused(self) -> set[str]:
        """The keys that the store could not read since then, as its answer says."""
        return {key for key, answer in self._answers() if answer < 0 and answer != LEASE_EXPIRED}

    def _answers(self) -> Iterator[tuple[str, int]]:
        for keys, answers in self._gets:
            yield from zip(keys, answers, strict=True)


class Receiver:
    """A receive thread that ends every load in a report, and tells of a failed one what is there of it.

    An exception outside the stock thread's own `try`, or one that is no Exception (SystemExit), would leave
    the request unreported for ever, and the latter would end the thread. Here both are a failed load.

    Reports by block id are not safe where loads in flight share blocks: the scheduler takes every block of
    an async load to belong to one request. So failures are reported as vLLM does it for hybrid models, by
    request.
    """

    def __init__(self, thread: KVCacheStoreRecvingThread) -> None:
        self._thread = thread
        self._store = CheckedStore(thread.store)
        self._handle, self._finished = thread._handle_request, thread.set_finished_request
        self._failed = thread.set_failed_request
        self._lock = threading.Lock()
        self._there: dict[str, int] = {}
        self._broken: dict[str, int] = {}
        self._in_hand: ReqMeta | None = None  # until it is reported
        thread._is_hma_required = True
        thread.store = self._store
        thread._handle_request = self.handle  # type: ignore[method-assign, assignment]
        thread.set_finished_request = self.finished  # type: ignore[method-assign, assignment]
        thread.set_failed_request = self.failed  # type: ignore[method-assign, assignment]

    def take(self) -> PartialLoads:
        """The loads that have failed since the last question.

        To be asked after the thread has been asked who has failed and finished: then it is never late.
        """
        with self._lock:
            told = PartialLoads({}, self._there, self._broken)
            self._there, self._broken = {}, {}
        return told

    def handle(self, request: ReqMeta) -> None:
        self._in_hand = request
        self._store.forget()
        try:
            self._handle(request)
        except BaseException as error:
            kind = type(error).__name__
            if loads := _exceptions.due(kind):
                logger.exception(
                    "kv-singleflight: the load of request %s ended in an exception (%s: %d loads since the"
                    " last such line).",
                    request.req_id,
                    kind,
                    loads,
                )
            if self._in_hand is not None:
                self.failed(request.req_id)
                self.finished(request.req_id)
                self._thread.request_queue.task_done()

    def failed(self, request_id: str) -> None:
        there, broken = 0, None
        try:
            assert self._in_hand is not None
            there = blocks_there(self._thread, self._in_hand, self._store.brought())
            broken = first_block(self._thread, self._in_hand, self._store.refused())
        except Exception as error:
            if _exceptions.due(f"what is there: {type(error).__name__}"):
                logger.exception("kv-singleflight: nothing is taken to be there of request %s.", request_id)
        with self._lock:
            self._there[request_id] = there
            if broken is not None:
                self._broken[request_id] = broken
        self._failed(request_id)

    def finished(self, request_id: str) -> None:
        self._in_hand = None
        self._finished(request_id)


def build_worker_meta(
    stock: MooncakeStoreWorkerMetadata | None, receivers: Iterable[Receiver]
) -> MooncakeStoreWorkerMetadata | None:
    """The stock metadata, and what the receivers have to tell; None if there is nothing at all."""
    told = PartialLoads(stock.completed_saves if stock is not None else {})
    for receiver in receivers:
        told.aggregate(receiver.take())
    return told if told.there or stock is not None else None


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
