"""KV-cache groups: which a `Setup.spec` has, and which slots a token of each attends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    from .setup import Setup

SPECS: Final = {
    "full": ("full",),
    "mla": ("mla",),
    "window": ("window", "full", "window"),
    "chunked": ("chunked", "full"),
}
"""`Setup.spec` -> the kinds of its groups, in vLLM's order: that of the layers, the first being windowed."""

Attended = Callable[[int], int]
"""Position of a token -> the first slot that it reads."""


def kinds(setup: Setup) -> tuple[str, ...]:
    return SPECS[setup.spec]


def attended(setup: Setup) -> list[Attended]:
    """Of each group; said here once more, in tokens and not in blocks, to check vLLM's and our arithmetic."""
    width = setup.window
    by_kind: dict[str, Attended] = {
        "full": lambda position: 0,
        "mla": lambda position: 0,
        "window": lambda position: max(position - width + 1, 0),
        "chunked": lambda position: position // width * width,
    }
    return [by_kind[kind] for kind in kinds(setup)]


def kv_cache_groups(setup: Setup) -> list[KVCacheGroupSpec]:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        KVCacheSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    size, plain = setup.block_size // setup.dcp, {"head_size": 16, "dtype": torch.float32}
    by_kind: dict[str, Callable[[], KVCacheSpec]] = {
        "full": lambda: FullAttentionSpec(block_size=size, num_kv_heads=6, **plain),
        "mla": lambda: MLAAttentionSpec(block_size=size, num_kv_heads=1, **plain),
        "window": lambda: SlidingWindowSpec(
            block_size=size, num_kv_heads=6, sliding_window=setup.window, **plain
        ),
        "chunked": lambda: ChunkedLocalAttentionSpec(
            block_size=size, num_kv_heads=6, attention_chunk_size=setup.window, **plain
        ),
    }
    return [KVCacheGroupSpec([f"layer {i}"], by_kind[kind]()) for i, kind in enumerate(kinds(setup))]


def group_of(key: str) -> int:
    """The group that a key of the store belongs to."""
    return int(key.rsplit("@", 2)[1].removeprefix("group:"))
