"""Engines of other models and settings than the suite's own, each in a process of its own.

`python -m tests.faults.configured NAME MODEL OUT` starts one and puts the same cohort through it three times:
with the stock connector's scheduler side, in attach mode, and in park mode. It writes one JSON object: what
each has come to. The environment is that of `Stack.env`, with four receive threads and everything in one
process.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from connector_patch.config import Config
from connector_patch.lab.engine import Burst, Engine
from connector_patch.plugin import NAME
from tests.faults.checksums import guard
from tests.faults.cohort import tailed
from tests.support import BLOCK, blocks

SALT = 4500
"""Far from the salts that tests count up from: the store is the same."""
TOKENS = 24
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "first_k_dense_replace": 2,  # that is, no layer has experts
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def mla(_model: str) -> Engine:
    """A tiny DeepSeek-V2 with random weights. On CPU vLLM turns prefix caching off for MLA: it is switched on
    again, and block size 16 is forced."""
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def hook(cls: Any, vllm_config: Any) -> None:
        stock(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(hook)  # type: ignore[method-assign]
    # As wide as those of the suite's model: greedy output is to depend on every block.
    random, seeds = dummy_loader.initialize_single_dummy_weight, itertools.count()

    def wide(weight: Any) -> None:
        if weight.dim() < 2:
            weight.data.fill_(1)  # a norm's
        else:
            random(weight, -0.35, 0.35, next(seeds))

    dummy_loader.initialize_single_dummy_weight = wide
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(DEEPSEEK))
    # Where the CPU has AMX, vLLM prefers a backend that takes bfloat16 only.
    plain = {"attention_backend": "CPU_MLA", "load_format": "dummy"}
    return Engine(folder, NAME, block_size=16, max_model_len=2048, **plain)


def ngram(model: str) -> Engine:
    """The suite's own model, with n-gram speculation."""
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    return Engine(model, NAME, speculative_config=speculative)


ENGINES: dict[str, Callable[[str], Engine]] = {"mla": mla, "ngram": ngram}


def cohort(engine: Engine) -> Burst:
    """Six requests for one cold prefix. No Get ends before all have been asked for a few times, and no step
    is made before all Gets have ended: so batches are the same, whoever loads."""
    prompts = tailed(blocks(1, 2, 3, 4, salt=SALT), *(f"r{i}" for i in range(6)))
    engine.gate.open.clear()
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=TOKENS)
    burst = Burst()
    steps = engine.collect(time.perf_counter(), burst)
    for _ in range(5):
        next(steps)
    engine.gate.open.set()
    engine.worker_connector.connector_worker.recv_request_queue.join()
    for _ in steps:
        pass
    return burst


def drafted(engine: Engine) -> Counter[str]:
    """How many drafts the scheduler hears of from now on, and how many were right."""
    counts: Counter[str] = Counter()
    stock = engine.scheduler.make_spec_decoding_stats

    def heard(*args: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any) -> Any:
        counts.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return stock(
            *args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **more
        )

    engine.scheduler.make_spec_decoding_stats = heard
    return counts


def main() -> None:
    from connector_patch.mooncake import MooncakeStore
    from connector_patch.park import ParkScheduler

    name, model, out = sys.argv[1:]
    engine = ENGINES[name](model)
    connector = engine.connector
    attach, drafts = connector.layer, drafted(engine)
    answers: dict[str, Any] = {"on": connector.mode.value, "block": engine.scheduler.block_size}
    engine.fill([[*blocks(1, 2, 3, 4, salt=SALT), 5]])
    park = ParkScheduler(MooncakeStore(connector.connector_scheduler), Config())
    for mode, connector.layer in {"stock": None, "attach": attach, "park": park}.items():
        engine.cold()
        engine.recorder.take()
        drafts.clear()
        free = engine.free_blocks()
        if mode == "attach":
            with guard(engine) as watching:  # byte for byte what the store has
                burst = cohort(engine)
            answers["published"] = len(watching.loaded)
        else:
            burst = cohort(engine)
        answers[mode] = {
            "tokens": burst.tokens,
            "gets": engine.recorder.take().gets,
            "drafts": dict(drafts),
        }
        engine.cold()
        answers[mode]["lost"] = free - engine.free_blocks()
    answers["keys"] = 4 * BLOCK // engine.scheduler.block_size
    Path(out).write_text(json.dumps(answers))
    engine.close()


if __name__ == "__main__":
    main()
