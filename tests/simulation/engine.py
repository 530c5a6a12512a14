"""vLLM's configuration objects, scheduler and connectors, as `Setup` asks for them."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import mmap
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as store_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import scheduler as store_scheduler
from vllm.utils.math_utils import round_up
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.structured_output import StructuredOutputManager

from . import offload_native, offload_simple
from .groups import kv_cache_groups

if TYPE_CHECKING:
    from .offload import OffloadWorker, Tier
    from .other import Shelf
    from .setup import Setup
    from .worker import Worker

MAX_TOKENS = 2048
OFFLOADING = {"offloading": "OffloadingConnector", "simple": "SimpleCPUOffloadConnector"}
"""`Setup.store` -> vLLM's connector to CPU memory."""
STORES = ("SingleFlightMooncakeStoreConnector", "SingleFlightConnector", "MooncakeStoreConnector")
STORES += tuple(OFFLOADING.values())
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 1000,
    "max_position_embeddings": MAX_TOKENS,
    "torch_dtype": "float32",
}


@functools.cache
def _plain() -> VllmConfig:
    """A complete configuration, made once: vLLM takes over a second for it. Others are changed copies."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_TOKENS)
        return VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(max_model_len=MAX_TOKENS, is_encoder_decoder=False),
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
        )


def changed(config: Any, **changes: Any) -> Any:
    """A copy with other values, past vLLM's own checks: they know this machine, not the one simulated."""
    changed = copy.copy(config)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def _speculative_config(setup: Setup) -> SpeculativeConfig | None:
    if not setup.drafts:
        return None
    plain = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=setup.drafts,
        prompt_lookup_max=3,
        target_model_config=_plain().model_config,
        target_parallel_config=_plain().parallel_config,
    )
    with_drafter: SpeculativeConfig = changed(plain, method=setup.drafter)
    return with_drafter


def _connectors(setup: Setup, shelf: Shelf | None) -> dict[str, Any]:
    """Which connector, or connectors, as `--kv-transfer-config` names them."""
    extra: dict[str, Any] = {
        "lookup_async": setup.lookup_async,
        "load_async": setup.load_async,
        "save_decode_cache": setup.save_decode,
    }
    layer: dict[str, Any] = {}
    if setup.mode != "stock":
        given = {"mode": setup.mode, "load_or_compute": setup.load_or_compute, **setup.options}
        layer = {"singleflight": given}
    if setup.wrapped and layer:
        stock = {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": extra}
        extra = {"connector": stock}
    extra |= layer
    wrapper = {
        "kv_connector": "SingleFlightConnector",
        "kv_connector_module_path": "connector_patch.wrapper",
    }
    ours = {
        "kv_connector": "SingleFlightMooncakeStoreConnector",
        "kv_connector_module_path": "connector_patch.connector",
    }
    one = {
        **(wrapper if setup.wrapped else ours if layer else {"kv_connector": "MooncakeStoreConnector"}),
        "kv_role": setup.role,
        "kv_connector_extra_config": extra,
    }
    if setup.store in OFFLOADING:
        one = _offloading(setup, extra.get("singleflight"))
    if not setup.other:
        return one
    other = {
        "kv_connector": "OtherConnector",
        "kv_connector_module_path": "tests.simulation.other",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shelf": shelf},
    }
    children = {"before": [other, one], "after": [one, other]}[setup.other]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }


def _offloading(setup: Setup, singleflight: dict[str, Any] | None) -> dict[str, Any]:
    """One of vLLM's connectors to CPU memory, in our wrapper unless it is to be alone."""
    alone: dict[str, Any] = {"kv_connector": OFFLOADING[setup.store], "kv_role": setup.role}
    groups = kv_cache_groups(setup)
    block_bytes = sum(group.kv_cache_spec.page_size_bytes for group in groups)
    if setup.store == "offloading":
        chunk_bytes = round_up(block_bytes * setup.workers * setup.chunk, mmap.PAGESIZE)
        alone["kv_connector_extra_config"] = {
            "cpu_bytes_to_use": chunk_bytes * (setup.cpu_blocks // setup.chunk),
            "blocks_per_chunk": setup.chunk,
            "offload_prompt_only": not setup.save_decode,
        }
    else:
        alone["kv_connector_extra_config"] = {
            "cpu_bytes_to_use_per_rank": block_bytes * setup.cpu_blocks,
            "lazy_offload": setup.lazy,
        }
    if singleflight is None:
        return alone
    return {
        "kv_connector": "SingleFlightConnector",
        "kv_connector_module_path": "connector_patch.wrapper",
        "kv_role": setup.role,
        "kv_connector_extra_config": {"connector": alone, "singleflight": singleflight},
    }


def _vllm_config(setup: Setup, shelf: Shelf | None) -> VllmConfig:
    plain = _plain()
    config: VllmConfig = changed(
        plain,
        scheduler_config=changed(
            plain.scheduler_config,
            max_num_batched_tokens=setup.token_budget,
            max_num_scheduled_tokens=None,
            max_num_seqs=setup.max_seqs,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=setup.long_prefill,
            policy=setup.policy,
            async_scheduling=setup.async_scheduling,
            scheduler_reserve_full_isl=setup.reserve_full,
            watermark=setup.watermark,
        ),
        cache_config=changed(
            plain.cache_config,
            block_size=setup.block_size // setup.dcp,
            num_gpu_blocks=setup.blocks + 1,
            enable_prefix_caching=True,
        ),
        parallel_config=changed(
            plain.parallel_config,
            tensor_parallel_size=setup.ranks,
            pipeline_parallel_size=setup.stages,
            prefill_context_parallel_size=setup.pcp,
            decode_context_parallel_size=setup.dcp,
            world_size=setup.workers,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_load_failure_policy="recompute" if setup.recompute else "fail",
            **_connectors(setup, shelf),
        ),
        speculative_config=_speculative_config(setup),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=setup.events, publisher="null"),
    )
    return config


def _kv_cache_config(setup: Setup) -> KVCacheConfig:
    groups = kv_cache_groups(setup)
    tensors = []
    if setup.store in OFFLOADING:
        # vLLM puts the layers of all groups into one allocation, side by side in each block.
        pages = [group.kv_cache_spec.page_size_bytes for group in groups]
        tensors = [
            KVCacheTensor(
                (setup.blocks + 1) * sum(pages), group.layer_names, page, sum(pages), sum(pages[:i])
            )
            for i, (group, page) in enumerate(zip(groups, pages, strict=True))
        ]
    return KVCacheConfig(setup.blocks + 1, tensors, groups, prefix_cache_retention_interval=setup.retention)


@contextlib.contextmanager
def _settings(**values: object) -> Iterator[None]:
    """vLLM's settings, past its cache of them, which an engine in this process would have filled."""
    before = {name: vars(envs)[name] for name in values if name in vars(envs)}
    vars(envs).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(envs)[name]
        vars(envs).update(before)


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


MakeWorker = Callable[[VllmConfig, KVCacheConfig, int], "Worker | OffloadWorker"]


def build(
    setup: Setup, make_worker: MakeWorker, lookup_client: Any, shelf: Shelf
) -> tuple[Scheduler, list[KVConnectorBase_V1]]:
    """The scheduler with its connector, and each worker's connector."""
    config, kv_cache_config = _vllm_config(setup, shelf), _kv_cache_config(setup)
    kind = AsyncScheduler if setup.async_scheduling else Scheduler
    settings = {
        "VLLM_MOONCAKE_LOAD_RECV_THREADS": setup.lanes,
        "VLLM_USE_V2_MODEL_RUNNER": setup.v2_runner,
    }
    with (
        _settings(**settings),
        _replaced(store_scheduler, "LookupKeyClient", lambda _config: lookup_client),
    ):
        scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=setup.block_size,
        )
    assert scheduler.connector is not None
    workers = []
    for rank in range(setup.workers):
        simulated = make_worker(config, kv_cache_config, rank)
        with _replaced(store_connector, "MooncakeStoreWorker", functools.partial(_made, simulated)):
            connector = type(scheduler.connector)(config, KVConnectorRole.WORKER, kv_cache_config)
        if setup.store == "offloading":
            offload_native.join(child(connector, "OffloadingConnector"), simulated)
        elif setup.store == "simple":
            simple = "SimpleCPUOffloadConnector"
            offload_simple.join(child(connector, simple), simulated, child(scheduler.connector, simple))
        workers.append(connector)
    return scheduler, workers


def _made(worker: Worker | OffloadWorker, *_: Any) -> Worker | OffloadWorker:
    return worker


def child(connector: Any, *kinds: str) -> Any:
    """The connector of such a class name, in another or not; None if there is none."""
    if type(connector).__name__ in kinds:
        return connector
    inside = [c for c in vars(connector).values() if isinstance(c, KVConnectorBase_V1)]
    found = (child(c, *kinds) for c in [*getattr(connector, "sub_connectors", ()), *inside])
    return next((c for c in found if c is not None), None)


def tier(setup: Setup, scheduler: Scheduler, workers: list[Any]) -> Tier | None:
    """What the scheduler side of a connector to CPU memory says is there."""
    if setup.store not in OFFLOADING:
        return None
    connector = child(scheduler.connector, OFFLOADING[setup.store])
    kind = offload_native.NativeTier if setup.store == "offloading" else offload_simple.SimpleTier
    return kind(connector, setup, workers)


def batches_in_flight(setup: Setup) -> int:
    """As `VllmConfig.max_concurrent_batches`."""
    if setup.async_scheduling and (setup.v2_runner or setup.stages == 1):
        return setup.stages + 1
    return setup.stages
