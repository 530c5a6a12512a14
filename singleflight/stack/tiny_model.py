"""Tiny random models that vLLM serves in float32 on a CPU; made once, then cached.

Their weights are wide (initializer_range 0.2), so that greedy output depends on every KV block: a wrong
block shows as a wrong token. KV size of the Llama: 4 layers x 2 x 1 head x 64 x 4 bytes = 2 KiB a token.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 2048
MAX_TOKENS = 16_384
NAME = "tiny-llama-v1"
GEMMA = "tiny-gemma3-v1"
"""Two layers with a sliding window of `WINDOW` tokens and one of full attention: three KV-cache groups."""
WINDOW = 64


class ModelError(RuntimeError):
    """The model cannot be made; the message is one sentence."""


def cache_folder() -> Path:
    """`$KVSF_CACHE`, else `$XDG_CACHE_HOME/kv-singleflight`, else `~/.cache/kv-singleflight`."""
    if named := os.environ.get("KVSF_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv-singleflight"


def ensure(folder: Path | None = None, name: str = NAME) -> Path:
    """The folder of the model `NAME` or `GEMMA`, made if it is not there. ModelError if that is not possible.

    It is built under a temporary name and renamed, so that a half-written one is never used. The building
    runs in a process of its own: importing transformers here would cost every later start.
    """
    target = (folder or cache_folder()) / name
    if (target / "config.json").exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"the model folder {target.parent} cannot be written ({error.strerror});"
            " set KVSF_CACHE to a folder that can"
        ) from None
    try:
        run = subprocess.run(
            [sys.executable, "-m", "singleflight.stack.tiny_model", str(scratch), name],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if run.returncode != 0:
            last = (run.stderr.strip().splitlines() or ["(nothing)"])[-1]
            raise ModelError(f"the tiny model could not be made: {last}")
        with contextlib.suppress(OSError):  # another process was first: its model is the same
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def build(folder: Path, name: str) -> None:
    """Write the model and a word-level tokenizer (`t0` ... `t2047`) into `folder`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    kind: Any = Gemma3ForCausalLM if name == GEMMA else LlamaForCausalLM
    config: Any = LlamaConfig(**common, num_hidden_layers=4)
    if name == GEMMA:
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        layers: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": WINDOW}
        heads: dict[str, Any] = {"head_dim": 64, "query_pre_attn_scalar": 64, "pad_token_id": 0}
        config = Gemma3TextConfig(**common, **layers, **heads)
    kind(config).save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "t0",
                "eos_token": "t1",
                "unk_token": "t2",
                "model_max_length": MAX_TOKENS,
            }
        )
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2])
