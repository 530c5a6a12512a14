"""SingleFlightMooncakeStoreConnector: the stock connector with one more idea. Thin: it delegates."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeStoreConnectorMetadata,
    MooncakeStoreWorkerMetadata,
)

from . import compat, metrics, plugin, prom
from .choice import Chooser
from .layered import Layered
from .mooncake import MooncakeStore
from .worker import Receiver, SingleFlightMetadata, acknowledged, build_worker_meta

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class SingleFlightMooncakeStoreConnector(Layered, MooncakeStoreConnector):
    """`MooncakeStoreConnector`, in which concurrent loads of one block become one load.

    Raises ValueError at construction for a wrong `kv_connector_extra_config.singleflight`.
    """

    _receivers: Sequence[Receiver] = ()
    """The worker side's receive threads, once the scheduler side has turned a mode on."""

    # -- scheduler side ----------------------------------------------------------------------------------

    def store_name(self) -> str:
        return "mooncake"

    def sizes(self) -> compat.Sizes:
        assert self.connector_scheduler is not None
        return self.connector_scheduler

    def make_store(self, kv_cache_manager: KVCacheManager) -> MooncakeStore:
        assert self.connector_scheduler is not None
        return MooncakeStore(
            self.connector_scheduler, drops_last=getattr(kv_cache_manager, "use_eagle", False)
        )

    def chooser(self, pretends: bool = False) -> Chooser | None:
        assert self._store is not None
        return Chooser.of(self.singleflight, self._vllm_config, self._store, pretends)

    def step_metadata(
        self, meta: KVConnectorMetadata, acknowledge: Set[str], preempted: set[str]
    ) -> SingleFlightMetadata:
        assert isinstance(meta, MooncakeStoreConnectorMetadata)
        if preempted:
            meta.preempted_req_ids = preempted  # what the worker has of them is out of date in either case
        return SingleFlightMetadata(meta, acknowledge, self.sizes()._hash_block_size)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return metrics.SingleFlightStats(data=data) if data is not None else metrics.SingleFlightStats()

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return prom.SingleFlightPromMetrics(*arguments)

    # -- worker side -------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if isinstance(self._get_connector_metadata(), SingleFlightMetadata):
            self._harden()
        super().start_load_kv(forward_context, **kwargs)

    def _harden(self) -> None:
        """Before the first load: the scheduler side has asked for it."""
        assert self.connector_worker is not None
        if not self._receivers:
            self._receivers = [Receiver(thread) for thread in self.connector_worker.kv_recv_threads]

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """vLLM asks after `get_transfer_results`."""
        stock = super().build_connector_worker_meta()
        if not self._receivers:
            return stock
        assert stock is None or isinstance(stock, MooncakeStoreWorkerMetadata)
        return build_worker_meta(stock, self._receivers)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        metadata = self._get_connector_metadata()
        if isinstance(metadata, SingleFlightMetadata):
            return acknowledged(results, metadata)
        return results


# MultiConnector's statistics look each child up by its name, also one that was found by its module path.
plugin.register()
