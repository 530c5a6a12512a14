"""What the scheduler side tells the worker, and what the worker adds to stock behaviour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker


class SingleFlightMetadata(MooncakeStoreConnectorMetadata):
    """The stock metadata of one step, and the requests that the worker must acknowledge.

    That it comes at all tells the worker that attach mode is on.
    """

    def __init__(self, stock: MooncakeStoreConnectorMetadata, acknowledge: Iterable[str]) -> None:
        super().__init__(stock.unfinished_request_ids, stock.preempted_req_ids)
        self.requests = stock.requests
        self.acknowledge = frozenset(acknowledge)


def report_failures_per_request(worker: MooncakeStoreWorker) -> None:
    """Have failed loads reported as request ids, as vLLM does for hybrid models.

    Reports by block id are not safe where loads in flight share blocks: the scheduler takes every block of
    an async load to belong to one request.
    """
    for thread in worker.kv_recv_threads:
        thread._is_hma_required = True


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
