"""The compatibility matrix: what a vLLM or a deployment can have, and which modes are on there.

`compat.py` walks over it at start-up, and docs/compatibility.md is made of it. Each row has a question; it
answers with what it found in the running parts (the reason's "{}"), or with something false.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .config import Mode

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


ATTACH, PARK, SHADOW = Mode.ATTACH, Mode.PARK, Mode.SHADOW
ALL: Final = (ATTACH, PARK, SHADOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that a vLLM or a deployment can have.

    Attributes:
        name: as a user knows it.
        asks: is it there? Its arguments are those of the tuple that the row is in.
        on: the modes, of `ALL`, that are supported where it is there. The others pass through.
        reason: half a sentence, why they pass through; "{}" stands for what was found.
        shown_by: tests that show it, as path::name.
    """

    name: str
    asks: Callable[..., object]
    on: tuple[Mode, ...]
    reason: str = ""
    shown_by: tuple[str, ...]


SEEDS: Final = (
    "tests/simulation/test_seeds.py::test_ours_passes",
    "tests/simulation/test_seeds.py::test_stock_passes_but_for_its_known_bugs",
)
"""Random stories in which the seed decides: of attach and park, and of shadow."""
OTHER_SEEDS: Final = ("tests/simulation/test_seeds.py::test_other_configurations",)
"""The same of attach and park, each with one thing that the seed does not decide."""
REAL_ENGINES: Final = (
    "tests/faults/test_other_models.py::test_six_requests_are_one_get_and_say_what_they_say_in_stock"
)
KINDS: Final = "tests/simulation/test_kinds.py"
ROLES: Final = f"{KINDS}::test_every_role_shares_loads_and_saves_what_it_would_alone"
OF_SHADOW: Final = "tests/simulation/test_world.py::test_shadow_counts_requests_of_every_kind"
RELEASES: Final = "tests/simulation/test_releases.py"
A_SETTING: Final = "tests/connector/test_start_up.py::TestPassThrough::test_a_setting_nobody_tests"
A_KIND: Final = "tests/connector/test_start_up.py::TestPassThrough::test_a_kind_of_kv_cache_nobody_tests"

# -- vLLM itself -----------------------------------------------------------------------------------------

CALLS: Final = {
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("self", "scheduler_output"),
    "update_connector_output": ("self", "connector_output"),
    "bind_kv_cache_manager": ("self", "kv_cache_manager"),
}
"""What vLLM 0.30 to 0.33 call on a connector, and the parameters. One more may change what is asked."""
ANSWER: Final = "tuple[int | None, bool]"
"""What `get_num_new_matched_tokens` answers there."""

ALLOCATE_SLOTS: Final = (
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
"""Parameters of `KVCacheManager.allocate_slots` in vLLM 0.32 and 0.33, the signature that allocation.py was
read against; 0.31 has all but the last. One more may change what an adopted block means: refused."""


def _binds_no_manager() -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return not hasattr(base.KVConnectorBase_V1, "bind_kv_cache_manager")


def _other_call() -> str | None:
    """The first call that is not as we know it."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    for name, parameters in CALLS.items():
        found = inspect.signature(getattr(base.KVConnectorBase_V1, name))
        if tuple(found.parameters) != parameters:
            return name
        if name == "get_num_new_matched_tokens" and str(found.return_annotation) != ANSWER:
            return name
    return None


def _reports_no_failed_load() -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as store_worker
    from vllm.v1.core.sched.scheduler import Scheduler

    receiver = inspect.signature(store_worker.KVCacheStoreRecvingThread.__init__)
    return (
        getattr(base, "KVConnectorTransferResults", None) is None
        or not hasattr(Scheduler, "_handle_failed_recving")
        or not hasattr(store_worker.MooncakeStoreWorker, "get_transfer_results")
        or "is_hma_required" not in receiver.parameters
    )


def _other_allocate_slots() -> str | None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    found = tuple(inspect.signature(KVCacheManager.allocate_slots).parameters)
    if found in (ALLOCATE_SLOTS, ALLOCATE_SLOTS[:-1]):
        return None
    return ", ".join(sorted(set(found) ^ set(ALLOCATE_SLOTS)) or ["their order"])


VLLM: Final = (
    Row(
        name="A vLLM that binds no KVCacheManager to its connectors (before 0.30)",
        asks=_binds_no_manager,
        on=(),
        reason="this vLLM binds no KVCacheManager to its connectors (0.30 to 0.33 do)",
        shown_by=(f"{RELEASES}::TestCalls::test_a_vllm_that_binds_no_manager",),
    ),
    Row(
        name="A connector call with other parameters, or another answer, than in vLLM 0.30 to 0.33",
        asks=_other_call,
        on=(),
        reason="the connector call {} is not as in vLLM 0.30 to 0.33",
        shown_by=(
            f"{RELEASES}::TestCalls::test_a_call_with_one_more_parameter",
            f"{RELEASES}::TestCalls::test_an_answer_of_another_kind",
        ),
    ),
    Row(
        name="A vLLM that does not report a failed load per request (before 0.31)",
        asks=_reports_no_failed_load,
        on=(SHADOW,),
        reason="this vLLM cannot report a failed load per request (0.31 and later can)",
        shown_by=(f"{RELEASES}::TestFeatures::test_a_vllm_that_cannot_report",),
    ),
    Row(
        name="`KVCacheManager.allocate_slots` with another signature than in vLLM 0.31 to 0.33",
        asks=_other_allocate_slots,
        on=(SHADOW,),
        reason="KVCacheManager.allocate_slots has another signature than in 0.31 to 0.33 ({})",
        shown_by=(f"{RELEASES}::TestFeatures::test_an_allocate_slots_of_another_signature",),
    ),
)
"""Asked of the vLLM that is installed: no arguments."""

# -- the deployment --------------------------------------------------------------------------------------

MULTI_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
READ: Final = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "NixlBaseConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "Delegate",
        "Layered",
        "SimpleCPUOffloadConnector",
        "SingleFlightConnector",
        "SingleFlightMooncakeStoreConnector",
        "Unwrapping",
    }
)
"""Connectors of vLLM 0.32 that touch a request's blocks only where they were chosen to load into them, or
once it has been scheduled with them. LMCacheMPConnector remembers the first blocks that a request was given,
and saves from those when it has started again in others; MoRIIOConnector has blocks written to without being
chosen."""


def says_who_is_chosen() -> bool:
    """Whether vLLM asks the connector that it has chosen to load what it loads, right before it allocates."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base.KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")


def _beside_others(*_: object) -> bool:
    """vLLM imports the module only where it is used."""
    return MULTI_CONNECTOR in sys.modules


def _not_read(config: VllmConfig, *_: object) -> str:
    """Connector classes that are loaded in this process, where several are in use: a child of MultiConnector
    does not see the others. The one that we share the loads of is not beside us."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    loaded, found = [KVConnectorBase_V1], set()
    while loaded and _beside_others():
        kinds = loaded.pop().__subclasses__()
        loaded += kinds
        found |= {kind.__name__ for kind in kinds}
    own = str(getattr(config.kv_transfer_config, "kv_connector", None))
    return ", ".join(sorted(name for name in found - READ if not name.startswith(own)))


def _others_scheduler(config: VllmConfig, _: KVCacheConfig) -> str | None:
    """A scheduler of somebody else's may ask, allocate and report in another order."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    found = config.scheduler_config.get_scheduler_cls()
    return None if found in (Scheduler, AsyncScheduler) else f"{found.__module__}.{found.__qualname__}"


def _kinds(cache: KVCacheConfig, *names: str) -> str:
    """The kinds of the groups' specs that are among these."""
    found = {type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups}
    return ", ".join(sorted(found & set(names)))


def _other_kinds(cache: KVCacheConfig) -> str:
    """Kinds that no row of this table is about."""
    known = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
    found = {type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups}
    return ", ".join(sorted(found - {*known, "MambaSpec"}))


def _sizes(cache: KVCacheConfig, field: str) -> str:
    """This field of the specs that have it set, such as a full-attention spec with a window."""
    found = {getattr(group.kv_cache_spec, field, None) for group in cache.kv_cache_groups} - {None}
    return " and ".join(sorted(map(str, found)))


def beside_full(cache: KVCacheConfig) -> str:
    """The kind of the windowed groups, where all other groups are of full attention, and there are some."""
    kinds = {type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups}
    full = [g.kv_cache_spec for g in cache.kv_cache_groups if type(g.kv_cache_spec).__name__ == FULL]
    # A full-attention spec that has a window stands for layers of both kinds.
    mixed = any(getattr(spec, "sliding_window", None) for spec in full) or any(
        getattr(spec, "attention_chunk_size", None) for spec in full
    )
    (kind, *more) = sorted(kinds - {FULL}) or [""]
    return kind if full and not mixed and not more and kind in WINDOWED else ""


def _count(cache: KVCacheConfig) -> str:
    return str(len(cache.kv_cache_groups))


def _over_one(config: VllmConfig, size: str) -> int | None:
    """That size of the parallel configuration, where it is not 1."""
    found: int = getattr(config.parallel_config, size, 1)
    return found if found > 1 else None


def _speculation(config: VllmConfig) -> str | None:
    """The method."""
    speculative = config.speculative_config
    return None if speculative is None else str(speculative.method)


def _extra(config: VllmConfig, key: str, default: object) -> Any:
    assert config.kv_transfer_config is not None
    return config.kv_transfer_config.kv_connector_extra_config.get(key, default)


FULL: Final = "FullAttentionSpec"
WINDOWED: Final = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")
NO_DRAFT_KV: Final = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation whose drafts have no KV cache."""
DRAFT_KV: Final = ("eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model")
"""Those whose drafter has one, in the model's blocks. All but the last read the model's hidden states."""

DEPLOYMENT: Final = (
    Row(
        name="A scheduler that is not vLLM's own",
        asks=_others_scheduler,
        on=(SHADOW,),
        reason="the scheduler is {}, not vLLM's own",
        shown_by=("tests/connector/test_start_up.py::TestPassThrough::test_a_scheduler_of_somebody_elses",),
    ),
    Row(
        name="HiSparse (vLLM 0.33 may start its loads later than it allocates, or never)",
        asks=lambda _, cache: getattr(cache, "hisparse_host_num_blocks", None) is not None,
        on=(SHADOW,),
        reason="HiSparse is on: a load may start later than it is allocated, or never",
        shown_by=(f"{RELEASES}::TestFeatures::test_deferred_loads",),
    ),
    Row(
        name="Auxiliary outputs (`aux_output_config`)",
        asks=lambda config, _: getattr(getattr(config, "aux_output_config", None), "enabled", False),
        on=(SHADOW,),
        reason="aux_output_config is on: vLLM may load less than the connector has",
        shown_by=(f"{RELEASES}::TestFeatures::test_auxiliary_outputs",),
    ),
    Row(
        name="Sliding-window layers beside full attention (Gemma 3, GPT-OSS)",
        asks=lambda _, cache: beside_full(cache) == "SlidingWindowSpec",
        on=ALL,
        shown_by=(
            "tests/simulation/test_windows.py::test_random_stories",
            "tests/connector/test_gemma.py::test_eight_requests_for_one_cold_prefix_load_it_once",
        ),
    ),
    Row(
        name="Chunked local attention beside full attention (Llama 4)",
        asks=lambda _, cache: beside_full(cache) == "ChunkedLocalAttentionSpec",
        on=ALL,
        shown_by=("tests/simulation/test_windows.py::test_random_stories",),
    ),
    Row(
        name="Other combinations of KV-cache groups, or none",
        asks=lambda _, cache: len(cache.kv_cache_groups) != 1 and not beside_full(cache) and _count(cache),
        on=(SHADOW,),
        reason="the model has {} KV-cache groups, and they are not windowed ones beside full attention",
        shown_by=("tests/connector/test_start_up.py::TestPassThrough::test_two_kv_cache_groups",),
    ),
    Row(
        name="Speculative decoding in a model of several KV-cache groups",
        asks=lambda config, cache: len(cache.kv_cache_groups) > 1 and _speculation(config),
        on=(SHADOW,),
        reason="speculative decoding is on ({}), in a model of several KV-cache groups",
        shown_by=("tests/connector/test_start_up.py::TestPassThrough::test_windows_and_speculation",),
    ),
    Row(
        name="MLA (DeepSeek, Kimi)",
        asks=lambda _, cache: _kinds(cache, "MLAAttentionSpec"),
        on=ALL,
        shown_by=(*OTHER_SEEDS, REAL_ENGINES),
    ),
    Row(
        name="Sliding-window attention alone, or with the hybrid KV-cache manager off",
        asks=lambda _, cache: not beside_full(cache) and _sizes(cache, "sliding_window"),
        on=(SHADOW,),
        reason="the KV-cache group is windowed ({} tokens), not plain full attention",
        shown_by=(A_KIND, "tests/connector/test_start_up.py::TestPassThrough::test_a_sliding_window"),
    ),
    Row(
        name="Chunked local attention alone, or with the hybrid KV-cache manager off",
        asks=lambda _, cache: not beside_full(cache) and _sizes(cache, "attention_chunk_size"),
        on=(SHADOW,),
        reason="the KV-cache group has attention chunks ({} tokens), not plain full attention",
        shown_by=(A_KIND,),
    ),
    Row(
        name="Mamba and other recurrent layers",
        asks=lambda _, cache: _kinds(cache, "MambaSpec"),
        on=(SHADOW,),
        reason="the KV-cache group is {}, not plain full attention",
        shown_by=("tests/connector/test_start_up.py::TestPassThrough::test_recurrent_layers",),
    ),
    Row(
        name="Other kinds of KV cache (cross-attention, attention sinks, layers of several sizes)",
        asks=lambda _, cache: _other_kinds(cache),
        on=(SHADOW,),
        reason="the KV-cache group is {}, not plain full attention",
        shown_by=(A_KIND,),
    ),
    Row(
        name="Speculative decoding by n-gram or suffix",
        asks=lambda config, _: (found := _speculation(config)) in NO_DRAFT_KV and found,
        on=ALL,
        shown_by=(*OTHER_SEEDS, REAL_ENGINES),
    ),
    Row(
        name="Speculative decoding by EAGLE, MTP or a draft model",
        asks=lambda config, _: (found := _speculation(config)) in DRAFT_KV and found,
        on=ALL,
        shown_by=(
            *OTHER_SEEDS,
            "tests/simulation/test_speculation.py::test_nobody_computes_less_than_in_stock",
        ),
    ),
    Row(
        name="Speculative decoding by EAGLE, MTP or a draft model, with several KV-cache groups",
        asks=lambda config, cache: (
            _speculation(config) in DRAFT_KV and (count := len(cache.kv_cache_groups)) != 1 and str(count)
        ),
        on=(SHADOW,),
        reason="the drafter's KV cache is in one of {} groups",
        shown_by=(
            "tests/connector/test_start_up.py::TestPassThrough::test_a_drafter_with_a_group_of_its_own",
        ),
    ),
    Row(
        # The last blocks of a load are then not final, and vLLM caches them only later.
        name="Speculative decoding by MTP of several modules",
        asks=lambda config, _: getattr(config, "num_prefill_lookahead_tokens", 0) > 1,
        on=(SHADOW,),
        reason="the drafter has several MTP modules, each of which reads one token further ahead",
        shown_by=(A_SETTING,),
    ),
    Row(
        name="Speculative decoding by another method",
        asks=lambda config, _: (found := _speculation(config)) not in (*NO_DRAFT_KV, *DRAFT_KV) and found,
        on=(SHADOW,),
        reason="speculative decoding is on ({})",
        shown_by=(A_SETTING,),
    ),
    Row(
        name="Prefill context parallelism",
        asks=lambda config, _: _over_one(config, "prefill_context_parallel_size"),
        on=ALL,
        shown_by=OTHER_SEEDS,
    ),
    Row(
        name="Prefill context parallelism beside pipeline or decode context parallelism",
        asks=lambda config, _: (
            _over_one(config, "prefill_context_parallel_size")
            and (
                _over_one(config, "pipeline_parallel_size")
                or _over_one(config, "decode_context_parallel_size")
            )
        ),
        on=(SHADOW,),
        reason="prefill context parallelism is combined with another, where the store's keys are not each"
        " rank's own",
        shown_by=(A_SETTING,),
    ),
    Row(
        name="Decode context parallelism",
        asks=lambda config, _: _over_one(config, "decode_context_parallel_size"),
        on=ALL,
        shown_by=OTHER_SEEDS,
    ),
    Row(
        name="Pipeline parallelism",
        asks=lambda config, _: _over_one(config, "pipeline_parallel_size"),
        on=ALL,
        shown_by=(
            *OTHER_SEEDS,
            "tests/simulation/test_situations.py::TestStages::test_a_follower_leaves_in_time",
        ),
    ),
    Row(
        name="Prefix caching off",
        asks=lambda config, _: not config.cache_config.enable_prefix_caching,
        on=(SHADOW,),
        reason="prefix caching is off",
        shown_by=(A_SETTING,),
    ),
    Row(
        name="`load_async: false`",
        asks=lambda config, _: not _extra(config, "load_async", True),
        on=(),
        reason="load_async is false: vLLM's store worker asserts that it is true, and the engine ends at its"
        " first step",
        shown_by=(A_SETTING, "tests/simulation/test_known.py::test_synchronous_loads_end_the_engine"),
    ),
    Row(
        name="MultiConnector with Nixl-, Mooncake-, Example-, Offloading- or SimpleCPUOffloadConnector",
        asks=_beside_others,
        on=ALL,
        shown_by=(
            "tests/faults/test_connectors_and_ranks.py::test_before_another_connector_its_requests_share_one_get",
            "tests/faults/test_connectors_and_ranks.py"
            "::test_after_another_connector_its_requests_share_what_that_has_not",
            "tests/connector/test_park_mode.py::test_beside_another_connector",
            "tests/simulation/test_beside.py::test_one_get_for_all_who_load_from_the_store",
            "tests/simulation/test_seeds.py::test_beside_another_connector",
        ),
    ),
    Row(
        # Who only waits, and who only watches, need not know.
        name="MultiConnector in a vLLM that does not tell its children who is chosen (before 0.32)",
        asks=lambda *_: _beside_others() and not says_who_is_chosen(),
        on=(PARK, SHADOW),
        reason="MultiConnector is in use, and this vLLM does not say whom it has chosen to load (0.32 does)",
        shown_by=("tests/connector/test_start_up.py::TestPassThrough::test_multi_connector",),
    ),
    Row(
        name="MultiConnector with LMCache-, MoRIIO-, HF3FS- or FlexKV connectors, or one that is not vLLM's",
        asks=_not_read,
        on=(PARK, SHADOW),
        reason="{} is beside it in MultiConnector, and may use blocks that a request shares or has no longer",
        shown_by=("tests/connector/test_start_up.py::TestPassThrough::test_a_neighbour_that_keeps_blocks",),
    ),
    Row(
        name="Tensor parallelism",
        asks=lambda config, _: _over_one(config, "tensor_parallel_size"),
        on=ALL,
        shown_by=(
            "tests/simulation/test_world.py::test_four_requests_for_one_prefix",
            "tests/faults/test_connectors_and_ranks.py::test_each_rank_loads_its_share_once",
        ),
    ),
    Row(
        name="Data parallelism (each engine for itself)",
        asks=lambda config, _: _over_one(config, "data_parallel_size"),
        on=ALL,
        shown_by=(
            "tests/simulation/test_situations.py::TestDataParallel::test_each_engine_loads_for_itself",
            "tests/connector/test_recording.py"
            "::test_each_engine_of_a_data_parallel_group_records_its_own_arrivals",
            "tests/simulation/test_world.py::test_four_requests_for_one_prefix",
        ),
    ),
    Row(
        name="Asynchronous scheduling",
        asks=lambda config, _: config.scheduler_config.async_scheduling,
        on=ALL,
        shown_by=SEEDS,
    ),
    Row(
        name="Asynchronous lookups (`lookup_async: true`)",
        asks=lambda config, _: _extra(config, "lookup_async", False),
        on=ALL,
        shown_by=SEEDS,
    ),
    Row(
        name="Priority scheduling",
        asks=lambda config, _: config.scheduler_config.policy == "priority",
        on=ALL,
        shown_by=SEEDS,
    ),
    Row(
        name="Chunked prefill",
        asks=lambda config, _: config.scheduler_config.enable_chunked_prefill,
        on=ALL,
        shown_by=SEEDS,
    ),
    Row(
        name="`kv_load_failure_policy: recompute`",
        asks=lambda config, _: config.kv_transfer_config.kv_load_failure_policy == "recompute",
        on=ALL,
        shown_by=SEEDS,
    ),
    Row(
        name="`kv_load_failure_policy: fail`",
        asks=lambda config, _: config.kv_transfer_config.kv_load_failure_policy == "fail",
        on=ALL,
        shown_by=SEEDS,
    ),
    Row(
        name="`kv_role: kv_producer`",
        asks=lambda config, _: config.kv_transfer_config.kv_role == "kv_producer",
        on=ALL,
        shown_by=(ROLES, OF_SHADOW),
    ),
    Row(
        name="`kv_role: kv_consumer`",
        asks=lambda config, _: config.kv_transfer_config.kv_role == "kv_consumer",
        on=ALL,
        shown_by=(ROLES, *SEEDS),
    ),
    Row(
        name="`save_decode_cache: true`",
        asks=lambda config, _: _extra(config, "save_decode_cache", False),
        on=ALL,
        shown_by=(ROLES, *SEEDS),
    ),
    Row(
        name="LoRA adapters",
        asks=lambda config, _: config.lora_config,
        on=ALL,
        shown_by=(
            f"{KINDS}::test_an_adapters_requests_share_with_each_other_only",
            f"{KINDS}::test_who_has_landed_waits_for_room_among_the_adapters",
            OF_SHADOW,
        ),
    ),
    Row(
        name="Multimodal prompts",
        asks=lambda config, _: config.model_config.is_multimodal_model,
        on=ALL,
        shown_by=(f"{KINDS}::test_a_picture_is_shared_with_who_shows_the_same", OF_SHADOW),
    ),
    Row(
        name="Prompts given as embeddings, with model runner v2 (with v1 the stock one ends the engine)",
        asks=lambda config, _: config.model_config.enable_prompt_embeds,
        on=ALL,
        shown_by=(
            f"{KINDS}::test_prompts_given_as_embeddings_share_by_their_embeddings",
            "tests/simulation/test_known.py::test_embeddings_end_the_engine_under_model_runner_v1",
            OF_SHADOW,
        ),
    ),
    Row(
        name="Pooling models",
        asks=lambda config, _: config.model_config.runner_type == "pooling",
        on=ALL,
        shown_by=(f"{KINDS}::test_pooling_requests_share_a_load", OF_SHADOW),
    ),
    Row(
        name="Structured output",
        asks=lambda *_: True,
        on=ALL,
        shown_by=(f"{KINDS}::test_who_waits_for_its_grammar_joins_once_that_is_there", OF_SHADOW),
    ),
    Row(
        name="Several samples of one prompt (`n`): vLLM makes a request of each",
        asks=lambda *_: True,
        on=ALL,
        shown_by=(
            "tests/faults/test_other_configurations.py::test_the_samples_of_one_prompt_share_its_load",
            "tests/simulation/test_world.py::test_four_requests_for_one_prefix",
        ),
    ),
    Row(
        name="Streaming input: the first chunk leads or follows, vLLM looks up no later one",
        asks=lambda *_: True,
        on=ALL,
        shown_by=(
            "tests/simulation/test_situations.py::TestStreamingInput::test_a_session_follows_a_load",
            "tests/simulation/test_situations.py::TestStreamingInput::test_a_session_leads_a_load",
            OF_SHADOW,
        ),
    ),
    Row(
        name="KV events",
        asks=lambda config, _: config.kv_events_config is not None,
        on=ALL,
        shown_by=("tests/simulation/test_events.py::test_stream_makes_sense", *SEEDS),
    ),
)
"""Asked of (vllm_config, kv_cache_config), in the order in which a reason is given."""

# -- the connector that SingleFlightConnector wraps ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A connector whose promises were read and tried (docs/any-store.md).

    Attributes:
        store: what the metrics call it.
        asked_first: it must be asked about a request before it hears of its blocks, even if the request
            adopts all that it needs.
        loads_once: who needs a block that it is loading for another is asked again later, however long.
        names_all: of a load that has failed it names every block (`byblock.py`).
    """

    store: str
    asked_first: bool = False
    loads_once: bool = False
    names_all: bool = False


CHILDREN: Final = {
    "LMCacheMPConnector": Child(store="lmcache", asked_first=True, names_all=True),
    "MooncakeStoreConnector": Child(store="mooncake"),
    "OffloadingConnector": Child(store="offloading", asked_first=True, loads_once=True),
    "SimpleCPUOffloadConnector": Child(store="simple-cpu-offload"),
}
"""By the names under which vLLM knows them."""
UNTRIED: Final = Child(store="other", asked_first=True)
"""What is taken for granted of any other: nothing."""


def _untried(child: str, config: VllmConfig, cache: KVCacheConfig, trusted: bool) -> str | None:
    return None if trusted or child in CHILDREN else child


def _reads_hidden_states(config: VllmConfig) -> bool:
    return config.speculative_config is not None and config.speculative_config.use_eagle()


WRAPPED_SEEDS: Final = (
    "tests/simulation/test_wrapped.py::test_random_stories",
    "tests/simulation/test_wrapped.py::test_random_stories_with_windowed_groups",
)

OFFLOAD_SEEDS: Final = (
    "tests/simulation/test_offload_seeds.py::test_random_stories",
    "tests/simulation/test_offload.py::test_chunks_of_several_blocks",
)

WRAPPED: Final = (
    Row(
        name="SingleFlightConnector around MooncakeStoreConnector",
        asks=lambda child, *_: child == "MooncakeStoreConnector",
        on=ALL,
        shown_by=WRAPPED_SEEDS,
    ),
    Row(
        name="SingleFlightConnector around LMCacheMPConnector",
        asks=lambda child, *_: child == "LMCacheMPConnector",
        on=ALL,
        shown_by=(
            "tests/lmcache/test_one_load.py::test_four_requests_for_one_cold_prefix_are_one_load",
            "tests/lmcache/test_faults.py::test_the_server_is_killed_while_it_loads",
            "tests/lmcache/test_modes.py::test_park_mode_loads_once",
            "tests/lmcache/test_modes.py::test_shadow_mode_changes_nothing_and_counts_what_would_have_been_shared",
        ),
    ),
    Row(
        name="SingleFlightConnector around OffloadingConnector or SimpleCPUOffloadConnector, CPU memory alone"
        " (not run on a GPU)",
        asks=lambda child, *_: child in ("OffloadingConnector", "SimpleCPUOffloadConnector"),
        on=ALL,
        shown_by=OFFLOAD_SEEDS,
    ),
    Row(
        name="SingleFlightConnector around a connector that is not in this table",
        asks=_untried,
        on=(),
        reason="nobody has tried whether {} keeps what a wrapped connector must promise; `trust` set to true"
        " beside `connector` says that it does",
        shown_by=("tests/wrapper/test_start_up.py::test_an_unknown_connector_passes_through",),
    ),
    Row(
        name="SingleFlightConnector around another connector than Mooncake's, with several KV-cache groups",
        asks=lambda child, _config, cache, _: (
            child != "MooncakeStoreConnector" and (count := len(cache.kv_cache_groups)) > 1 and str(count)
        ),
        on=(SHADOW,),
        reason="the model has {} KV-cache groups, and nobody has tried whether the wrapped connector"
        " loads all that a request needs of each",
        shown_by=("tests/wrapper/test_start_up.py::test_several_groups_whose_windows_nobody_vouches_for",),
    ),
    Row(
        name="SingleFlightConnector with a drafter that reads hidden states (EAGLE, MTP)",
        asks=lambda child, config, *_: _reads_hidden_states(config),
        on=(SHADOW,),
        reason="the drafter reads hidden states, and a wrapped connector does not say whether what it finds"
        " ends where such a drafter needs it to",
        shown_by=("tests/wrapper/test_start_up.py::test_a_drafter_that_reads_hidden_states",),
    ),
)
"""Asked of (the child's name, its configuration, the KV-cache groups, whether `trust` is set)."""

# -- what vLLM binds at start-up -------------------------------------------------------------------------


def _others_manager(manager: Any, _: Any) -> str | None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    known = type(manager) is KVCacheManager and "allocate_slots" not in vars(manager)
    return None if known else type(manager).__name__


BOUND: Final = (
    Row(
        name="A cache manager that is not vLLM's own, or that another plug-in has wrapped",
        asks=_others_manager,
        on=(SHADOW,),
        reason="the cache manager is {}, or somebody else has wrapped it",
        shown_by=("tests/connector/test_start_up.py::TestPassThrough::test_somebody_elses_wrapper",),
    ),
    Row(
        name="A cache manager without prefix caching",
        asks=lambda manager, _: not manager.enable_caching,
        on=(SHADOW,),
        reason="prefix caching is off",
        shown_by=("tests/connector/test_start_up.py::TestPassThrough::test_a_manager_that_caches_nothing",),
    ),
    Row(
        name="Block hashes finer than blocks (partial-hash hits)",
        asks=lambda _, stock: stock._block_size != stock._hash_block_size or stock.enable_partial_hash_hits,
        on=(),
        reason="block hashes are finer than blocks (partial-hash hits)",
        shown_by=("tests/faults/test_isolation.py::test_hashes_finer_than_blocks_pass_through",),
    ),
)
"""Asked of (the bound KVCacheManager, the stock connector's scheduler side)."""

ROWS: Final = (*VLLM, *DEPLOYMENT, *WRAPPED, *BOUND)
