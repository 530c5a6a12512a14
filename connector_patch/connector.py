"""SingleFlightMooncakeStoreConnector: the stock connector with one more idea. Thin: it delegates."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from . import auto, compat, config, metrics
from .attach import AttachScheduler
from .park import ParkScheduler
from .recorder import Recorder, quantiles_ms
from .shadow import Shadow
from .worker import SingleFlightMetadata, acknowledged, harden

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# Under vllm's name, so that its logging configuration shows our one line.
logger = init_logger(f"vllm.{__name__}")


class SingleFlightMooncakeStoreConnector(MooncakeStoreConnector):
    """`MooncakeStoreConnector`, in which concurrent loads of one block become one load.

    Raises ValueError at construction for a wrong `kv_connector_extra_config.singleflight`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.singleflight = config.parse(extra.get("singleflight"))
        super().__init__(vllm_config, role, kv_cache_config)
        self.attach: AttachScheduler | ParkScheduler | None = None
        self.mode = config.Mode.OFF
        """What the mode asked for came to: attach, park, shadow or off."""
        self.passes_through: str | None = None
        """Why the mode asked for is not on; None if it is on."""
        self.shadow: Shadow | None = None
        self.recorder: Recorder | None = None
        self._deltas: metrics.Deltas | None = None

    # -- scheduler side; where `attach` is None, every call goes to the stock code as it came ------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        asked = self.singleflight.mode
        if asked is config.Mode.AUTO:
            self._choose(kv_cache_manager)
        elif asked in (config.Mode.ATTACH, config.Mode.PARK):
            self.passes_through = self._coalesce(asked, kv_cache_manager)
        elif asked is config.Mode.SHADOW:
            self.passes_through = self._watch()
        if self.passes_through is not None:
            logger.warning("kv-singleflight passes through to the stock connector: %s.", self.passes_through)
        elif asked not in (config.Mode.AUTO, config.Mode.OFF):
            logger.info("kv-singleflight: %s mode is on.", asked.value)
        if self.singleflight.record is not None:
            self._record(self.singleflight.record)

    def _choose(self, kv_cache_manager: KVCacheManager) -> None:
        """Mode auto: attach if the verdict says so and it is possible, otherwise shadow; one log line."""
        assert self.connector_scheduler is not None
        objection = auto.objection(
            self.singleflight,
            block_size=self.connector_scheduler._block_size,
            model=self._vllm_config.model_config.model,
            now=datetime.datetime.now(datetime.UTC),
        )
        if objection is None:
            reason = self._coalesce(config.Mode.ATTACH, kv_cache_manager)
            if reason is None:
                logger.info("kv-singleflight: attach mode is on, as %s says.", self.singleflight.gate)
                return
            objection = f"the verdict says yes, but attach mode is not possible here: {reason}"
        self.passes_through = self._watch()
        if self.passes_through is None:
            logger.warning("kv-singleflight: shadow mode is on (counts, changes nothing): %s.", objection)

    def _coalesce(self, mode: config.Mode, kv_cache_manager: KVCacheManager) -> str | None:
        """Turn attach or park mode on, or say why it cannot be."""
        stock = self.connector_scheduler
        assert stock is not None
        adopting = mode is config.Mode.ATTACH
        reason = (
            compat.missing_feature()
            or compat.unsupported_setup(self._vllm_config, self._kv_cache_config, adopting=adopting)
            or compat.unsupported_manager(kv_cache_manager, stock)
        )
        if reason is None:
            if mode is config.Mode.PARK:
                self.attach = ParkScheduler(stock, self.singleflight)
            else:
                self.attach = AttachScheduler(stock, kv_cache_manager, self.singleflight)
            self.mode = mode
            stats = self.attach.table.stats
            self._deltas = metrics.Deltas(lambda: metrics.flat(stats))
        return reason

    def _watch(self) -> str | None:
        """Turn shadow mode on, or say why it cannot be."""
        stock = self.connector_scheduler
        assert stock is not None
        if (reason := compat.unwatchable(stock)) is None:
            self.mode = config.Mode.SHADOW
            shadow = self.shadow = Shadow(stock, self.singleflight.policy.max_blocks)
            size = compat.bytes_per_block(self._vllm_config, self._kv_cache_config)
            self._deltas = metrics.Deltas(lambda: metrics.flat_shadow(shadow, size))
        return reason

    def _record(self, record: config.Record) -> None:
        """Start the recorder. ValueError if its file cannot be written."""
        stock, parallel = self.connector_scheduler, self._vllm_config.parallel_config
        assert stock is not None
        if self.shadow is None and compat.unwatchable(stock) is None:
            self.shadow = Shadow(stock, self.singleflight.policy.max_blocks)  # for its load windows

        def windows_ms() -> dict[str, float] | None:
            return quantiles_ms(self.shadow.windows_seen, self.shadow.windows_s) if self.shadow else None

        path = record.path
        if parallel.data_parallel_size > 1:  # each of these engines has its own arrivals
            path = path.with_name(f"{path.name}.dp{parallel.data_parallel_rank}")
        try:
            self.recorder = Recorder(
                path,
                int(record.max_mb * 1e6),
                stock._hash_block_size,
                self._vllm_config.model_config.model,
                windows_ms,
                lambda error: logger.error("kv-singleflight: recording to %s has ended: %s.", path, error),
            )
        except BlockingIOError:
            logger.warning("kv-singleflight: does not record, since another process records to %s.", path)
        except OSError as error:
            raise ValueError(
                f"{config.WHERE}.record.path: {str(path)!r} is not accepted ({error.strerror});"
                " give a file that can be written"
            ) from None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.attach is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        return self.attach.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.attach is None:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        else:
            self.attach.allocated(request, blocks, num_external_tokens)
        if self.shadow is not None:
            self.shadow.allocated(request, blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self.attach is None:
            return super().build_connector_meta(scheduler_output)
        preempted = scheduler_output.preempted_req_ids or set()
        scheduler_output.preempted_req_ids = self.attach.still_preempted(preempted)
        meta = super().build_connector_meta(scheduler_output)
        scheduler_output.preempted_req_ids = preempted
        assert isinstance(meta, MooncakeStoreConnectorMetadata)
        meta.preempted_req_ids = preempted  # what the worker has of them is out of date in either case
        return SingleFlightMetadata(meta, self.attach.acknowledgements())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.shadow is not None:
            self.shadow.output(connector_output)
        super().update_connector_output(connector_output)
        if self.attach is not None:
            self.attach.output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.attach is not None:
            aborted = request.status is RequestStatus.FINISHED_ABORTED
            self.attach.finished(request.request_id, aborted)
        if self.recorder is not None:
            full = request.num_prompt_tokens // self.recorder.block_size
            hashes = request.block_hashes[:full]
            self.recorder.finished(
                request.arrival_time, request.num_prompt_tokens, request.num_output_tokens, hashes
            )
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool | None:
        if self.attach is not None:
            self.attach.reset()
        if self.shadow is not None:
            self.shadow.reset()
        return super().reset_cache()

    def shutdown(self) -> None:
        recorder = getattr(self, "recorder", None)  # also called by __del__, of what was never complete
        if recorder is not None:
            self.recorder = None
            recorder.close()
        super().shutdown()  # type: ignore[no-untyped-call]

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._deltas is None:
            return super().get_kv_connector_stats()
        if self.attach is not None:
            return self._deltas.take()
        assert self.shadow is not None
        return self._deltas.take(self.shadow.take_windows()) if self.shadow.changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return metrics.SingleFlightStats(data=data) if data is not None else metrics.SingleFlightStats()

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return metrics.SingleFlightPromMetrics(*arguments)

    # -- worker side -------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if isinstance(self._get_connector_metadata(), SingleFlightMetadata):
            assert self.connector_worker is not None
            harden(self.connector_worker)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        metadata = self._get_connector_metadata()
        if isinstance(metadata, SingleFlightMetadata):
            return acknowledged(results, metadata)
        return results
