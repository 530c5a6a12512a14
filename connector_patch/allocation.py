"""The one wrapper around KVCacheManager.allocate_slots.

For a request with a plan, the leader's pending blocks are passed on as computed blocks, so that the pool
refcounts them as it does for any prefix-cache hit; only the request's own suffix stays external. Blocks
layout of vLLM 0.32: `comp | new_comp | ext_comp | new`; adopted blocks move from ext_comp to new_comp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request


class Adoption(Protocol):
    """What a plan tells the allocator."""

    tokens: int
    external_tokens: int
    chosen: bool
    allocated: bool

    @property
    def blocks(self) -> list[Any]: ...


def wrap(
    manager: KVCacheManager,
    plan_of: Callable[[str], Adoption | None],
    claimed_in_vain: Callable[[], int],
    refused: Callable[[str], None],
) -> None:
    """Install the wrapper on this instance.

    `plan_of(request_id)` gives the plan made in this pass: vLLM allocates right after it has asked, so the
    plan's flights are as they were. `claimed_in_vain()` is how many of the blocks that vLLM reserves for
    prefills in flight belong to requests that start again: they hold nothing, but vLLM goes on counting them,
    and the first to load again would wait for itself.
    `refused(request_id)` is told when there is no room for a request.
    """
    stock = manager.allocate_slots

    def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        if reserved := kwargs.get("reserved_blocks", 0):
            kwargs["reserved_blocks"] = max(reserved - claimed_in_vain(), 0)
        plan = plan_of(request.request_id)
        external = kwargs.get("num_external_computed_tokens", 0)
        # Another connector's answer may have been taken, or ours dropped: no adoption.
        if plan is not None and not (plan.chosen and external == plan.external_tokens):
            plan = None
        if plan is not None:
            local = kwargs["new_computed_blocks"].blocks
            theirs = plan.blocks
            adopted = [theirs] if len(local) == 1 else zip(*theirs, strict=True)
            both = tuple([*mine, *more] for mine, more in zip(local, adopted, strict=True))
            kwargs["new_computed_blocks"] = manager.create_kv_cache_blocks(both)
            kwargs["num_new_computed_tokens"] += plan.tokens
            kwargs["num_external_computed_tokens"] = external - plan.tokens
        blocks = stock(request, *args, **kwargs)
        if plan is not None:
            plan.allocated = blocks is not None
        if blocks is None:
            refused(request.request_id)
        return blocks

    manager.allocate_slots = allocate_slots  # type: ignore[method-assign]


def most_blocks(group: SingleTypeKVCacheManager, tokens: int) -> int:
    """The blocks that vLLM reserves in this group for so many tokens of a request that holds none."""
    blocks = -(-tokens // group.block_size)
    most = group.max_admission_blocks_per_request
    return blocks if most is None else min(blocks, most)
