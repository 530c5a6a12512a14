"""Everything of our connectors that is no store's own: modes, start-up, recorder, metrics, what vLLM calls.

A mixin before a connector class (`connector.py`: Mooncake's; `wrapper.py`: any): where `layer` is None, every
call goes on to that one as it came, with what a later vLLM may add to it.
"""

from __future__ import annotations

import datetime
from collections.abc import Set
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import MooncakeStoreConnectorStats
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from singleflight import __version__
from singleflight.files import shown
from singleflight.gate import verdict

from . import auto, compat, config, metrics, tracing
from .attach import AttachScheduler
from .choice import Chooser
from .park import ParkScheduler
from .recorder import Recorder, path_of, quantiles_ms
from .rules import Rules
from .shadow import Shadow
from .sparse import FallBacks
from .timeline import Timeline
from .windows import Windows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .store import Store

# Under vllm's name, so that its logging configuration shows our one line.
logger = init_logger(f"vllm.{__name__}")


class Layered(KVConnectorBase_V1, SupportsHMA):
    """A connector in which concurrent loads of one block become one load.

    Raises ValueError at construction for a wrong `kv_connector_extra_config.singleflight`.
    """

    coalesces = True
    stats_class: ClassVar[type[KVConnectorStats]] = MooncakeStoreConnectorStats

    layer: Rules | None = None
    mode = config.Mode.OFF
    """What the mode asked for came to: attach, park, shadow or off."""
    passes_through: str | None = None
    """Why the mode asked for is not on; None if it is on."""
    objection: str | None = None
    """Why mode auto has not chosen attach; None if it has, or was not asked."""
    attach_refused: str | None = None
    """Why attach mode would pass through here, whatever was asked; None if it would not. Mode off without a
    recording does not ask."""
    shadow: Shadow | None = None
    _chooses: Rules | Shadow | None = None
    """Where load or compute is a choice: who has to hear of steps."""
    recorder: Recorder | None = None
    _source: metrics.Source | None = None
    _deltas: metrics.Deltas | None = None
    _spans: tracing.WaitSpans | None = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.singleflight = config.parse(extra.get("singleflight"))
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[arg-type]
        self._timeline = Timeline()
        self._fall_backs = FallBacks()
        self._store: Store | None = None
        if role is KVConnectorRole.SCHEDULER and not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"):
            self._pass_through(compat.missing_feature())

    def _pass_through(self, reason: str | None) -> None:
        """Stock behaviour, where there is a reason."""
        self.passes_through = reason
        if reason is not None:
            logger.warning("kv-singleflight passes through to the stock connector: %s.", reason)

    # -- what differs between stores ---------------------------------------------------------------------

    def store_name(self) -> str:
        """Label `store` of the info metric."""
        raise NotImplementedError

    def store_config(self) -> VllmConfig:
        """The configuration that the store's own connector was made with."""
        return self._vllm_config

    def sizes(self) -> compat.Sizes:
        """Tokens a block and a hash, on the scheduler's side."""
        raise NotImplementedError

    def make_store(self, kv_cache_manager: KVCacheManager) -> Store:
        """The store as the rules see it."""
        raise NotImplementedError

    def chooser(self, pretends: bool = False) -> Chooser | None:
        """What decides between loading and computing; None where everybody loads."""
        return None

    def own_refusal(self, mode: config.Mode) -> str | None:
        """Why this store's loads cannot be shared, as half a sentence; None if they can."""
        return None

    def step_metadata(
        self, meta: KVConnectorMetadata, acknowledge: Set[str], preempted: set[str]
    ) -> KVConnectorMetadata:
        """The store's metadata of a step, and whom the worker must acknowledge."""
        raise NotImplementedError

    def answered(self, request: Request, num_local_tokens: int, answer: int | None) -> None:
        """The store's connector has been asked, and no layer is on."""

    def given(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """It has been told of the request's blocks, and no layer is on."""

    # -- start-up ----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager, *more: Any, **named: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager, *more, **named)
        self._store = self.make_store(kv_cache_manager)
        asked = self.singleflight.mode
        if asked is not config.Mode.OFF or self.singleflight.record is not None:
            self.attach_refused = self.refusal(config.Mode.ATTACH, kv_cache_manager)
        if asked is config.Mode.AUTO:
            self._choose(kv_cache_manager)
        elif asked in (config.Mode.ATTACH, config.Mode.PARK):
            self._pass_through(self._coalesce(asked, kv_cache_manager))
        elif asked is config.Mode.SHADOW:
            self._pass_through(self._watch(kv_cache_manager))
        if self.passes_through is None and asked is config.Mode.SHADOW and self.attach_refused is not None:
            logger.warning(
                "kv-singleflight: shadow mode is on; attach mode would pass through here: %s.",
                self.attach_refused,
            )
        elif self.passes_through is None and asked not in (config.Mode.AUTO, config.Mode.OFF):
            logger.info("kv-singleflight: %s mode is on.", asked.value)
        self._deltas = self._told()
        if self.singleflight.record is not None:
            self._record(self.singleflight.record, kv_cache_manager)

    def _told(self) -> metrics.Deltas:
        """The metrics, which begin with what this start-up came to."""
        found = verdict.found(self.singleflight.gate)
        info = {
            "asked": self.singleflight.mode.value,
            "mode": self.mode.value,
            "reason": "; ".join(filter(None, (self.objection, self.passes_through))),
            "attach_refused": self.attach_refused or "",
            "verdict": found.made_at if found is not None else "",
            "version": __version__,
            "store": self.store_name(),
        }
        predicted = found.redundancy if found is not None else None
        return metrics.Deltas(self._source, info, predicted, self.stats_class)

    def _choose(self, kv_cache_manager: KVCacheManager) -> None:
        """Mode auto: attach if the verdict says so and it is possible, otherwise shadow; one log line."""
        objection = auto.objection(
            self.singleflight,
            block_size=self.sizes()._block_size,
            model=self._vllm_config.model_config.model,
            now=datetime.datetime.now(datetime.UTC),
        )
        if objection is None:
            reason = self._coalesce(config.Mode.ATTACH, kv_cache_manager)
            if reason is None:
                logger.info("kv-singleflight: attach mode is on, as %s says.", self.singleflight.gate)
                return
            objection = f"the verdict says yes, but attach mode is not possible here: {reason}"
        elif self.attach_refused is not None:
            objection += f"; and a yes could not be obeyed here: {self.attach_refused}"
        self.objection = objection
        self._pass_through(self._watch(kv_cache_manager))
        if self.passes_through is None:
            logger.warning("kv-singleflight: shadow mode is on (counts, changes nothing): %s.", objection)
        else:
            logger.warning("kv-singleflight: attach mode is not on: %s.", objection)

    def _coalesce(self, mode: config.Mode, kv_cache_manager: KVCacheManager) -> str | None:
        """Turn attach or park mode on, or say why it cannot be."""
        reason, store = self.refusal(mode, kv_cache_manager), self._store
        if reason is None:
            assert store is not None
            chooser = self.chooser()
            if mode is config.Mode.PARK:
                windows = Windows.of(kv_cache_manager)
                self.layer = ParkScheduler(store, self.singleflight, windows=windows, chooser=chooser)
            else:
                self.layer = AttachScheduler(store, kv_cache_manager, self.singleflight, chooser=chooser)
            self._chooses = self.layer if chooser is not None else None
            self.mode = mode
            layer, size = self.layer, compat.bytes_per_block(self._vllm_config, self._kv_cache_config)
            self._spans = tracing.spans(self._vllm_config, lambda: layer._clock())
            ended = [self._spans.ended] if self._spans is not None else []
            self._source = metrics.OfTheTable(layer.table, size, *ended)
        return reason

    def _watch(self, kv_cache_manager: KVCacheManager) -> str | None:
        """Turn shadow mode on, or say why it cannot be."""
        if (reason := self.refusal(config.Mode.SHADOW, kv_cache_manager)) is None:
            assert self._store is not None
            self.mode = config.Mode.SHADOW
            chooser = self.chooser(pretends=True)
            shadow = self.shadow = Shadow(self._store, self.singleflight.policy.max_blocks, chooser=chooser)
            self._chooses = shadow if chooser is not None else None
            size = compat.bytes_per_block(self._vllm_config, self._kv_cache_config)
            self._source = metrics.OfTheShadow(shadow, size)
        return reason

    def refusal(self, mode: config.Mode, kv_cache_manager: KVCacheManager) -> str | None:
        """Why the mode cannot be on here, as half a sentence; None if it can."""
        return (
            compat.missing_feature(mode)
            or self.own_refusal(mode)
            or compat.unsupported_setup(self.store_config(), self._kv_cache_config, mode)
            or compat.unsupported_manager(kv_cache_manager, self.sizes(), mode)
        )

    def uses(self) -> list[str]:
        """The rows of the compatibility matrix that this deployment is in."""
        return compat.deployment(self.store_config(), self._kv_cache_config)

    def _record(self, record: config.Record, kv_cache_manager: KVCacheManager) -> None:
        """Start the recorder. Where that is not possible, one line says why: it never stops a server."""
        transfer = self._vllm_config.kv_transfer_config
        assert self._store is not None
        assert transfer is not None
        if self.shadow is None and self.refusal(config.Mode.SHADOW, kv_cache_manager) is None:
            # For its load windows.
            self.shadow = Shadow(self._store, self.singleflight.policy.max_blocks)

        def windows_ms() -> dict[str, float] | None:
            return quantiles_ms(self.shadow.windows_seen, self.shadow.windows_s) if self.shadow else None

        path = path_of(record.path, self._vllm_config.parallel_config, transfer.engine_id)
        try:
            self.recorder = Recorder(
                path,
                int(record.max_mb * 1e6),
                self.sizes()._hash_block_size,
                self._vllm_config.model_config.model,
                self._engine(kv_cache_manager),
                windows_ms,
                lambda error: logger.error("kv-singleflight: recording to %s has ended: %s.", path, error),
                lambda sentence: logger.warning("kv-singleflight: %s.", sentence),
            )
        except BlockingIOError:
            logger.warning("kv-singleflight: does not record, since another process records to %s.", path)
        except Exception as error:
            logger.error(
                "kv-singleflight: does not record. %s.record.path: '%s' is not accepted (%s);"
                " give a file that can be written.",
                config.WHERE,
                shown.path(path),
                getattr(error, "strerror", None) or error,
            )

    def _engine(self, kv_cache_manager: KVCacheManager) -> dict[str, Any]:
        """What the recording's header says of this engine."""
        told = self._vllm_config.scheduler_config
        assert self._store is not None
        size = compat.bytes_per_block(self._vllm_config, self._kv_cache_config)
        return {
            "mode": self.mode.value,
            "attach_refused": self.attach_refused,
            "max_num_seqs": told.max_num_seqs,
            "max_num_batched_tokens": told.max_num_batched_tokens,
            "receive_threads": self._store.parallel_loads,
            # Block 0 is vLLM's null block.
            "capacity_blocks": max(1, kv_cache_manager.block_pool.num_gpu_blocks - 1),
            "kv_bytes_per_token": size / self.sizes()._block_size,
        }

    # -- scheduler side ----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, *more: Any, **named: Any
    ) -> tuple[int | None, bool]:
        if self.recorder is not None:
            self._timeline.looked_up(request, num_computed_tokens)
        if self.layer is None:
            # Where vLLM declares a call abstract, mypy does not see the class that comes after this one.
            stock = super().get_num_new_matched_tokens(  # type: ignore[safe-super]
                request, num_computed_tokens, *more, **named
            )
            self.answered(request, num_computed_tokens, stock[0])
            if self._chooses is not None and self.shadow is not None:
                self.shadow.asked(request, num_computed_tokens, stock)
            return stock
        answer = self.layer.match(request, num_computed_tokens)
        self._may_wait(request)
        return answer

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """vLLM asks the connector that it has chosen to load, as it calls `allocate_slots`. A child of
        MultiConnector learns only by this whether it is the one."""
        if self.layer is not None:
            self.layer.chosen(request.request_id)
        return super().get_loaded_kv_cache_group_ids(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int, *more: Any, **named: Any
    ) -> None:
        if self.layer is None:
            super().update_state_after_alloc(  # type: ignore[safe-super]
                request, blocks, num_external_tokens, *more, **named
            )
            self.given(request, blocks, num_external_tokens)
        else:
            self.layer.allocated(request, blocks, num_external_tokens)
            self._may_wait(request)
        if self.shadow is not None:
            self.shadow.allocated(request, blocks)
        if self.recorder is not None:
            assert self._store is not None
            planned = self._store.planned(request.request_id)
            self._timeline.allocated(request, num_external_tokens, planned)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # vLLM asks from 0.32 on

        adopted = self.layer.adopted_tokens(request.request_id) if self.layer is not None else 0
        sources = super().get_external_cache_hit_sources(request, num_external_tokens - adopted)
        return {CacheHitSource.DEVICE: adopted, **sources} if adopted else sources

    def _may_wait(self, request: Request) -> None:
        layer, spans = self.layer, self._spans
        if spans is not None and layer is not None and layer.table.waiting(request.request_id):
            spans.joined(request)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, *more: Any, **named: Any
    ) -> KVConnectorMetadata:
        if self._chooses is not None:
            self._chooses.scheduled(scheduler_output)
        if self.layer is None:
            return super().build_connector_meta(  # type: ignore[safe-super]
                scheduler_output, *more, **named
            )
        if preempted := scheduler_output.preempted_req_ids:
            scheduler_output.preempted_req_ids = self.layer.still_preempted(preempted)
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[safe-super]
        if preempted:
            scheduler_output.preempted_req_ids = preempted
        return self.step_metadata(meta, self.layer.acknowledgements(), preempted or set())

    def update_connector_output(self, connector_output: KVConnectorOutput, *more: Any, **named: Any) -> None:
        if self.shadow is not None:
            self.shadow.output(connector_output)
        super().update_connector_output(connector_output, *more, **named)
        if self.layer is not None:
            self.layer.output(connector_output)
        if self.recorder is not None:
            self._timeline.output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...], *more: Any, **named: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.layer is not None:
            aborted = request.status is RequestStatus.FINISHED_ABORTED
            self.layer.finished(request.request_id, aborted)
        elif self._chooses is not None and self.shadow is not None:
            self.shadow.finished(request.request_id)
        if self.recorder is not None:
            self._over(self.recorder, request)
        return super().request_finished_all_groups(  # type: ignore[safe-super]
            request, block_ids, *more, **named
        )

    def _over(self, recorder: Recorder, request: Request) -> None:
        observed = self._timeline.over(request)
        if getattr(request, "streaming_queue", None) is not None:
            recorder.left_out()
            return
        full = request.num_prompt_tokens // recorder.block_size
        hashes = request.block_hashes[:full]
        recorder.finished(
            request.arrival_time, request.num_prompt_tokens, request.num_output_tokens, hashes, observed
        )

    def reset_cache(self, *more: Any, **named: Any) -> bool | None:
        if self.layer is not None:
            self.layer.reset()
        if self.shadow is not None:
            self.shadow.reset()
        return super().reset_cache(*more, **named)

    def shutdown(self) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()
        super().shutdown()  # type: ignore[no-untyped-call]

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._chooses is not None:
            self._chooses.step_done()
        stock = super().get_kv_connector_stats()
        if self._deltas is None:
            return stock
        if self.recorder is not None:
            self._timeline.step()
        told = self._deltas.take()
        if told is not None and self.layer is not None:
            self._fall_backs.look(self.layer.table.stats.fell_back)
        return told.aggregate(stock) if told is not None and stock is not None else told or stock
