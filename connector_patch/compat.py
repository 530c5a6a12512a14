"""Which vLLM and which configuration attach mode is built and tested for.

Anything else passes through: stock behaviour, and one log line with the sentence returned here. Features
are probed; a version string decides nothing by itself.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

ALLOCATE_SLOTS = (
    "self",
    "request",
    "num_new_tokens",
    "num_new_computed_tokens",
    "new_computed_blocks",
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "delay_cache_blocks",
    "num_encoder_tokens",
    "full_sequence_must_fit",
    "reserved_blocks",
    "has_scheduled_reqs",
    "skip_zeroing_group_ids",
)
"""Parameters of `KVCacheManager.allocate_slots` in vLLM 0.32, the signature that allocation.py was read
against. One more parameter may change what an adopted block means, so another signature is refused."""

MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def missing_feature() -> str | None:
    """What this vLLM lacks for attach mode, as half a sentence; None if nothing."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as store_worker
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(base.KVConnectorBase_V1, "bind_kv_cache_manager"):
        return "this vLLM has no bind_kv_cache_manager (0.30 and later have)"
    results = getattr(base, "KVConnectorTransferResults", None)
    receiver = inspect.signature(store_worker.KVCacheStoreRecvingThread.__init__)
    if (
        results is None
        or not hasattr(Scheduler, "_handle_failed_recving")
        or not hasattr(store_worker.MooncakeStoreWorker, "get_transfer_results")
        or "is_hma_required" not in receiver.parameters
    ):
        return "this vLLM cannot report a failed load per request (0.32 and later can)"
    found = tuple(inspect.signature(KVCacheManager.allocate_slots).parameters)
    if found != ALLOCATE_SLOTS:
        odd = sorted(set(found) ^ set(ALLOCATE_SLOTS)) or ["their order"]
        return f"KVCacheManager.allocate_slots has another signature than 0.32 ({', '.join(odd)})"
    return None


def unsupported_setup(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, adopting: bool = True
) -> str | None:
    """What in the deployment is not tested with attach mode, or park (not `adopting`); None if nothing."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV-cache groups, not one"
    spec = groups[0].kv_cache_spec
    if (
        type(spec) is not FullAttentionSpec
        or getattr(spec, "sliding_window", None) is not None
        or getattr(spec, "attention_chunk_size", None) is not None
    ):
        return f"the KV-cache group is {type(spec).__name__}, or windowed, not plain full attention"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on"
    parallel = vllm_config.parallel_config
    for name in (
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "pipeline_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}, not 1"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if not transfer.kv_connector_extra_config.get("load_async", True):
        return "load_async is false"
    # A child of MultiConnector cannot know at allocation time whether it was chosen to load; who only waits
    # need not. vLLM imports the module only where it is used.
    if adopting and MULTI_CONNECTOR in sys.modules:
        return "MultiConnector is in use"
    return None


def unsupported_manager(manager: KVCacheManager, connector_scheduler: Any) -> str | None:
    """What about the bound cache manager attach mode is not built for; None if nothing."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager as Known

    if type(manager) is not Known or "allocate_slots" in vars(manager):
        return f"the cache manager is {type(manager).__name__}, or somebody else has wrapped it"
    if not manager.enable_caching:
        return "prefix caching is off"
    if (
        connector_scheduler._block_size != connector_scheduler._hash_block_size
        or connector_scheduler.enable_partial_hash_hits
    ):
        return "block hashes are finer than blocks (partial-hash hits)"
    return None


def unwatchable(connector_scheduler: Any) -> str | None:
    """Why shadow mode cannot see loads of whole blocks begin and end; None if it can."""
    if not connector_scheduler.load_async:
        return "load_async is false, and synchronous loads are not reported"
    if (
        connector_scheduler._block_size != connector_scheduler._hash_block_size
        or connector_scheduler.enable_partial_hash_hits
    ):
        return "block hashes are finer than blocks (partial-hash hits)"
    return None


def bytes_per_block(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one KV block, all layers and all ranks."""
    one_rank = 0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        # A spec that stands for layers of several sizes has their sum already.
        layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
        one_rank += spec.page_size_bytes * layers
    return one_rank * vllm_config.parallel_config.world_size
