"""Where vLLM's releases, 0.28 to 0.33, differ in what the simulation calls. Each is probed here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import MooncakeStoreCoordinator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def known(callee: Callable[..., Any], **values: object) -> Mapping[str, Any]:
    """Those of the keyword arguments that this release takes."""
    return {name: value for name, value in values.items() if name in inspect.signature(callee).parameters}


def coordinator(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, block_size: int, hash_block_size: int
) -> MooncakeStoreCoordinator:
    """As the real worker makes it; up to 0.31 it did so in its constructor."""
    if hasattr(MooncakeStoreCoordinator, "from_kv_cache_config"):
        return MooncakeStoreCoordinator.from_kv_cache_config(
            kv_cache_config, vllm_config, block_size, hash_block_size
        )
    spec = vllm_config.speculative_config
    more = known(
        MooncakeStoreCoordinator.__init__,
        use_eagle=spec is not None and spec.use_eagle_block_drop(),
        retention_interval=getattr(kv_cache_config, "prefix_cache_retention_interval", None),
        dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size,
    )
    return MooncakeStoreCoordinator(kv_cache_config.kv_cache_groups, block_size, hash_block_size, **more)


def token_databases(worker: Any, metadata: data.KeyMetadata) -> list[data.ChunkedTokenDatabase]:
    """As the real worker makes them; up to 0.29 in its constructor, without layouts."""
    if hasattr(worker, "_build_token_databases"):
        return worker._build_token_databases(metadata, None)  # type: ignore[no-any-return]
    return [
        data.ChunkedTokenDatabase(
            dataclasses.replace(metadata, tp_rank=metadata.tp_rank // replicas, group_id=number),
            group.kv_cache_spec.block_size,
            hash_block_size=worker.hash_block_size,
        )
        for number, (group, replicas) in enumerate(
            zip(worker._kv_cache_groups, worker._group_tp_replication_factors, strict=True)
        )
    ]


def report(connector: Any, finished: set[str]) -> KVConnectorOutput:
    """One rank's word, as `KVConnectorModelRunnerMixin._get_kv_connector_output` collects it. Failures by
    request came with 0.30."""
    failed: dict[str, Any] = {}
    if hasattr(KVConnectorBase_V1, "get_transfer_results"):
        results = connector.get_transfer_results(finished)
        sent, received = results.finished_sending, results.finished_recving
        failed = {"failed_recving": results.failed_recving}
    else:
        sent, received = connector.get_finished(finished)
    return KVConnectorOutput(
        finished_sending=sent or None,
        finished_recving=received or None,
        **failed,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
        kv_connector_stats=connector.get_kv_connector_stats(),
        kv_cache_events=connector.get_kv_connector_kv_cache_events(),
        kv_connector_worker_meta=connector.build_connector_worker_meta(),
    )


def failed(out: KVConnectorOutput) -> list[Any]:
    """Requests whose load is reported as failed, or, where the store still reports by block, the blocks."""
    return sorted(getattr(out, "failed_recving", None) or out.invalid_block_ids)


def drains_loads_when_paused() -> bool:
    """From 0.32 on, who holds blocks goes on while nothing new is admitted; before, it waits as well."""
    return "_pause_state != PauseState.PAUSED_ALL" in inspect.getsource(Scheduler.schedule)


def drops_hashes_of_discarded_tokens() -> bool:
    """From 0.32 on. Before, a streaming-input session keeps the hash of a block whose last token was thrown
    away, and what is cached under it is wrong: vLLM's own bug, with any connector or none."""
    return "del session.block_hashes" in inspect.getsource(Scheduler._update_request_as_session)
