"""What our connector would come to behind `vllm serve MODEL ...`, without weights and without a server.

vLLM's own steps, as far as they need no device: its arguments become its configuration, the model is built on
the meta device (shapes, no memory), its layers say which KV cache they need, and vLLM's scheduler with our
connector is made of that. So it is the connector itself that answers. `python -m connector_patch.preview OUT
MODEL ...` writes the answer as JSON; in a process of its own, since vLLM keeps all of this in global state.
"""

from __future__ import annotations

import copy
import datetime
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig, ParallelConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.worker_base import WorkerBase

from . import auto, config, matrix
from .delegate import Delegate
from .layered import Layered
from .plugin import MODULES, NAME, WRAPPER

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

UNSEEN = "the draft model's own KV cache"
KINDS = {
    "full_attention": (FullAttentionSpec, ()),
    "sliding_attention": (SlidingWindowSpec, ("sliding_window",)),
    "chunked_attention": (ChunkedLocalAttentionSpec, ("attention_chunk_size",)),
}
"""`layer_types` of a Hugging Face configuration -> the KV cache, and what more it takes of there."""


class PreviewError(Exception):
    """There is no answer; one sentence says why."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The answer.

    Attributes:
        asked: the mode in --kv-transfer-config; None without that argument.
        objection: why mode auto would not choose attach, if it was asked; half a sentence.
        refusals: attach, park, shadow -> why it would pass through, half a sentence; None if it would be on.
        uses: the rows of the compatibility matrix that this deployment is in.
        kv_cache: the model's KV-cache groups, in words.
        unseen: what was not looked at, and may change the answer; None if nothing.
    """

    asked: str | None
    objection: str | None
    refusals: dict[str, str | None]
    uses: list[str]
    kv_cache: str
    unseen: str | None


def preview(model: str, arguments: list[str]) -> Preview:
    """The answer for `vllm serve model *arguments`. PreviewError, or whatever vLLM raises at such a start."""
    vllm_config, asked = _configured(model, arguments)
    unseen = UNSEEN if (draft := vllm_config.speculative_config) and draft.uses_draft_kv_cache() else None
    try:
        specs = _kv_cache_specs(vllm_config)
    except Exception as error:
        if (presumed := _presumed(vllm_config)) is None:
            raise
        specs = presumed
        unseen = f"the layers themselves, only their kinds in config.json, since the model {_failed(error)}"
    scheduler = _scheduler(vllm_config, specs)
    ours = _ours(scheduler.connector)
    manager = scheduler.kv_cache_manager
    objection = None
    if asked is not None and asked.mode is config.Mode.AUTO:
        objection = auto.objection(
            asked,
            block_size=ours.sizes()._block_size,
            model=vllm_config.model_config.model,
            now=datetime.datetime.now(datetime.UTC),
        )
    return Preview(
        asked=asked.mode.value if asked is not None else None,
        objection=objection,
        refusals={mode.value: ours.refusal(mode, manager) for mode in matrix.ALL},
        uses=ours.uses(),
        kv_cache=_in_words(scheduler),
        unseen=unseen,
    )


def _configured(model: str, arguments: list[str]) -> tuple[VllmConfig, config.Config | None]:
    """vLLM's configuration with our connector turned off, and what was asked of it."""
    parser = FlexibleArgumentParser()  # type: ignore[no-untyped-call]
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="command"))
    given = parser.parse_args(["serve", model, *arguments])
    given.model = model
    named = given.kv_transfer_config or KVTransferConfig(kv_connector=NAME, kv_role="kv_both")
    transfer, asked = _turned_off(named, given=given.kv_transfer_config is not None)
    given.kv_transfer_config = transfer
    try:
        made = EngineArgs.from_cli_args(given).create_engine_config()
    except OSError as error:
        if Path(model).exists():
            raise
        raise PreviewError(
            f"{model} is no folder here, and neither the Hugging Face hub nor its cache on this machine gives"
            f" its configuration ({str(error).strip().splitlines()[0]}); give a folder with a config.json"
        ) from None
    if made.kv_events_config is not None:
        made.kv_events_config.publisher = "null"  # it would bind a port
    return made, asked


def _turned_off(named: KVTransferConfig, given: bool) -> tuple[KVTransferConfig, config.Config | None]:
    """The same with our connector in mode off, so that making it has no effect, and what was asked of it."""
    transfer = copy.deepcopy(named)
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == "MultiConnector":
        children = [each for each in extra.get("connectors", []) if each.get("kv_connector") in MODULES]
        extras = [each.setdefault("kv_connector_extra_config", {}) for each in children]
    else:
        extras = [extra] if transfer.kv_connector in MODULES else []
    if not extras:
        raise PreviewError(
            f"--kv-transfer-config names {transfer.kv_connector}; give {NAME}, or {WRAPPER} around it,"
            " or leave the argument out"
        )
    asked = config.parse(extras[0].get("singleflight")) if given else None
    extras[0]["singleflight"] = {"mode": config.Mode.OFF.value}
    return transfer, asked


def _kv_cache_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Layer -> its KV cache, of the whole model as one rank would hold it."""
    parallel = vllm_config.parallel_config
    vllm_config.parallel_config = ParallelConfig()
    try:
        with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as folder:
            init_distributed_environment(1, 0, f"file://{folder}/alone", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            with set_default_torch_dtype(_dtype(vllm_config)), torch.device("meta"):
                initialize_model(vllm_config)
            current_platform.update_block_size_for_backend(vllm_config)
            return get_kv_cache_spec(vllm_config)
    finally:
        vllm_config.parallel_config = parallel


def _presumed(vllm_config: VllmConfig) -> dict[str, KVCacheSpec] | None:
    """The same as far as the model's configuration tells it; None if it does not."""
    vllm_config.compilation_config.static_forward_context.clear()  # of the layers that were built
    model, text = vllm_config.model_config, vllm_config.model_config.hf_text_config
    if model.is_hybrid or model.is_attention_free:
        return None
    shape: dict[str, Any] = {
        "block_size": vllm_config.cache_config.block_size,
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "dtype": _dtype(vllm_config),
    }
    window = ["sliding_attention" if model.get_sliding_window() else "full_attention"]
    specs: dict[str, KVCacheSpec] = {}
    for number, kind in enumerate(getattr(text, "layer_types", None) or window * text.num_hidden_layers):
        if model.use_mla:
            specs[str(number)] = MLAAttentionSpec(**shape)
        elif kind in KINDS:
            spec, more = KINDS[kind]
            specs[str(number)] = spec(**shape, **{name: getattr(text, name) for name in more})
        else:
            return None
    return specs


def _dtype(vllm_config: VllmConfig) -> torch.dtype:
    assert isinstance(vllm_config.model_config.dtype, torch.dtype)  # vLLM has made one of what was asked
    return vllm_config.model_config.dtype


def _failed(error: Exception) -> str:
    return f"could not be built without its weights ({type(error).__name__}: {_one_line(error)})"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


class _Executor:
    """One that holds a model without weights, as `EngineCore._initialize_kv_caches` asks it."""

    def __init__(self, vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> None:
        self.vllm_config = vllm_config
        self.specs = specs

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [self.specs]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [WorkerBase.get_supported_kv_cache_layouts(self)]  # type: ignore[arg-type]

    def determine_available_memory(self) -> list[int]:
        """For four requests of the longest length: few blocks, since each is a Python object."""
        one = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in self.specs.values())
        return [4 * one]

    def __getattr__(self, _: str) -> Any:
        """What it is told to do, it need not do."""
        return lambda *_, **__: None


_Inert: Any = type(
    "_Inert",
    (KVConnectorBase_V1,),
    dict.fromkeys(KVConnectorBase_V1.__abstractmethods__, lambda *_, **__: None),
)
"""In the place of a connector that is wrapped: made, it might look for its server."""


def _not_made(wrapper: Delegate, kind: object, cache: KVCacheConfig, role: KVConnectorRole) -> Any:
    return _Inert(wrapper.child_config, role, cache)


def _scheduler(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> Scheduler:
    """vLLM's own, with its connector bound, as `EngineCore.__init__` makes it."""
    executor = _Executor(vllm_config, specs)
    core: Any = SimpleNamespace(model_executor=executor, collective_rpc=executor.collective_rpc)
    Delegate.make_child = _not_made  # type: ignore[method-assign, assignment]
    with set_current_vllm_config(vllm_config):
        kv_cache_config = EngineCore._initialize_kv_caches(core, vllm_config)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        kind: Any = vllm_config.scheduler_config.get_scheduler_cls()
        made: Scheduler = kind(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=None,  # which a request would need; it would load a tokenizer
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
    return made


def _ours(connector: Any) -> Layered:
    """Ours, alone or the first among MultiConnector's."""
    several = getattr(connector, "_connectors", [connector])
    return next(each for each in several if isinstance(each, Layered))


def _in_words(scheduler: Scheduler) -> str:
    groups = scheduler.kv_cache_config.kv_cache_groups
    kinds = [
        f"{type(group.kv_cache_spec).__name__} ({len(group.layer_names)} layers,"
        f" blocks of {group.kv_cache_spec.block_size})"
        for group in groups
    ]
    return f"{len(groups)} KV-cache group{'s' * (len(groups) != 1)}: {', '.join(kinds)}"


def main(out: str, model: str, *arguments: str) -> None:
    try:
        told: dict[str, Any] = asdict(preview(model, list(arguments)))
    except PreviewError as error:
        told = {"error": str(error)}
    except Exception as error:  # whatever vLLM raises at such a start is the answer
        why = f"{type(error).__name__}: {_one_line(error)}"
        told = {"error": f"vLLM does not start with these arguments ({why})"}
    Path(out).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
