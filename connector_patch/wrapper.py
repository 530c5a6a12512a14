"""SingleFlightConnector: any one connector of vLLM, in which concurrent loads of one block become one load.

    {"kv_connector": "SingleFlightConnector", "kv_role": "kv_both",
     "kv_connector_extra_config": {"connector": {"kv_connector": "LMCacheMPConnector", ...},
                                   "singleflight": {"mode": "attach"}}}

It stands on what a connector's calls say (`contract.py`), and on nothing of the child's inside.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger

from . import child, compat, config, metrics, plugin, prom
from .byblock import Arrivals
from .config import LoadOrCompute
from .contract import Contract
from .delegate import Delegate
from .layered import Layered
from .matrix import CHILDREN, UNTRIED
from .rules import ASK_AGAIN, Rules
from .wrapped import StepMetadata, WorkerMetadata, WrappedStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")


class Unwrapping(Delegate):
    """The child, which hears what its own other side has said, without what we add to it."""

    layer: Rules | None
    _step: StepMetadata | None = None
    """The worker side's step, if attach or park mode is on."""
    _arrivals: Arrivals | None = None
    """The worker side's loads, from the first such step on."""
    _traits = UNTRIED
    """What is known of the child."""

    # -- worker side -------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._step = None
        if isinstance(connector_metadata, StepMetadata):
            self._step = connector_metadata
            self._arrivals = self._arrivals or Arrivals(self._traits.names_all)
            self._arrivals.expect(connector_metadata.loads)
        super().bind_connector_metadata(_of_child(connector_metadata))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.child.handle_preemptions(_of_child(kv_connector_metadata))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results: KVConnectorTransferResults = self.child.get_transfer_results(finished_req_ids)
        if self._arrivals is None:
            return results
        # What has failed is said no later than that it has ended: asked after it, nothing is missed.
        results = self._arrivals.heard(results, self.child.get_block_ids_with_load_errors())
        acknowledge = self._step.acknowledge if self._step is not None else frozenset()
        return replace(results, finished_recving={*results.finished_recving, *acknowledge})

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.child.get_block_ids_with_load_errors() if self._arrivals is None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        own = self.child.build_connector_worker_meta()
        if self._arrivals is None:
            return own
        there = self._arrivals.take_there()
        return WorkerMetadata(own, there) if own is not None or there else None

    # -- scheduler side ----------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: KVConnectorOutput, *more: Any, **named: Any) -> None:
        if self.layer is None:
            self.child.update_connector_output(connector_output, *more, **named)
            return
        out = connector_output
        meta, finished = out.kv_connector_worker_meta, out.finished_recving
        own = {request for request in finished or () if self.layer.loading(request)}
        out.kv_connector_worker_meta = meta.child if isinstance(meta, WorkerMetadata) else meta
        out.finished_recving = own or None
        try:
            self.child.update_connector_output(out, *more, **named)
        finally:
            out.kv_connector_worker_meta, out.finished_recving = meta, finished

    # -- both --------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = self.child.get_kv_connector_stats()
        return WrappedStats.of_child(type(self.child), stats) if stats is not None else None


class SingleFlightConnector(Layered, Unwrapping):
    """The connector that `kv_connector_extra_config.connector` names, in which concurrent loads of one block
    become one load.

    Raises ValueError at construction for a wrong `connector`, `trust` or `singleflight`.
    """

    stats_class = WrappedStats

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        self._trusted = child.trusted(vllm_config.kv_transfer_config.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self.child_config.kv_transfer_config
        assert transfer is not None
        self._name = str(transfer.kv_connector)
        self._traits = CHILDREN.get(self._name, UNTRIED)
        if role is KVConnectorRole.SCHEDULER and self.singleflight.load_or_compute is not LoadOrCompute.OFF:
            logger.warning(
                "kv-singleflight: load_or_compute is on, but what the loads of %s take is not known:"
                " everybody loads.",
                self._name,
            )
        self._twice: dict[str, set[str]] = {}
        """Finished requests that vLLM is to be told of by two reports -> those that have come."""

    # -- what differs between stores ---------------------------------------------------------------------

    def store_name(self) -> str:
        return self._traits.store if self._name in CHILDREN else self._name

    def store_config(self) -> VllmConfig:
        return self.child_config

    def sizes(self) -> compat.Sizes:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        return _Sizes(*resolve_kv_cache_block_sizes(self._kv_cache_config, self._vllm_config))

    def make_store(self, kv_cache_manager: KVCacheManager) -> Contract:
        return Contract(
            self.child, self.sizes()._block_size, self._traits.asked_first, self._traits.loads_once
        )

    def own_refusal(self, mode: config.Mode) -> str | None:
        return compat.unsupported_child(*self._setup(), mode)

    def uses(self) -> list[str]:
        return [*compat.around(*self._setup()), *super().uses()]

    def _setup(self) -> tuple[str, VllmConfig, KVCacheConfig, bool]:
        """What the rows about wrapped connectors are asked with."""
        return self._name, self.child_config, self._kv_cache_config, self._trusted

    def step_metadata(
        self, meta: KVConnectorMetadata, acknowledge: Set[str], preempted: set[str]
    ) -> StepMetadata:
        return StepMetadata(meta, frozenset(acknowledge), self._contract.take_new())

    def answered(self, request: Request, num_local_tokens: int, answer: int | None) -> None:
        if self.shadow is not None:
            self._contract.answered(request, num_local_tokens, answer)

    def given(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self.shadow is not None:
            self._contract.given(request, blocks, num_external_tokens)
            self._contract.take_new()

    @property
    def _contract(self) -> Contract:
        return cast("Contract", self._store)

    # -- scheduler side ----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, *more: Any, **named: Any
    ) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens, *more, **named)
        if self.layer is None or answer[0] is None:
            return answer
        there, contract = num_computed_tokens + answer[0], self._contract
        if not contract.owed(request.request_id, there):
            return answer
        again = contract.starts_again(request.request_id)
        # vLLM goes on to give it blocks. What the child may have is not loaded, as it is told then.
        found, _ = contract.ask(request, there)
        # Who has waited in vain does not wait for a lookup: the store may be what hangs.
        return answer if found is not None or again else ASK_AGAIN

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...], *more: Any, **named: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        loads = self.layer is not None and self.layer.unreported(request.request_id)
        saves, params = super().request_finished_all_groups(request, block_ids, *more, **named)
        if loads and saves:
            self._twice[request.request_id] = set()
        if self._store is not None:
            self._contract.forget(request.request_id)
        return saves, params

    def update_connector_output(self, connector_output: KVConnectorOutput, *more: Any, **named: Any) -> None:
        super().update_connector_output(connector_output, *more, **named)
        if self._twice:
            self._once(connector_output)

    def _once(self, out: KVConnectorOutput) -> None:
        """vLLM frees a finished request's blocks at the first report that it has received or sent, and does
        not know the request at the second. So the first is kept from it."""
        received, sent = set(out.finished_recving or ()), set(out.finished_sending or ())
        for request_id in (received | sent) & self._twice.keys():
            heard = self._twice[request_id]
            heard |= {kind for kind, ids in (("received", received), ("sent", sent)) if request_id in ids}
            if len(heard) == 2:
                del self._twice[request_id]
                if request_id in received:
                    sent.discard(request_id)
            else:
                received.discard(request_id)
                sent.discard(request_id)
        out.finished_recving, out.finished_sending = received or None, sent or None

    # -- the front end -----------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return metrics.WrappedSingleFlightStats.received(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> KVConnectorPromMetrics:
        return prom.WrappedPromMetrics(*child.named(vllm_config), *arguments)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A `compat.Sizes`."""

    _block_size: int
    _hash_block_size: int
    enable_partial_hash_hits: bool = False


def _of_child(meta: KVConnectorMetadata) -> KVConnectorMetadata:
    return meta.child if isinstance(meta, StepMetadata) else meta


# MultiConnector's statistics look each child up by its name, also one that was found by its module path.
plugin.register()
