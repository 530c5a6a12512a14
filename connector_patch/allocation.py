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
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Adoption(Protocol):
    """What a plan tells the allocator."""

    blocks: list[KVCacheBlock]
    tokens: int
    external_tokens: int
    allocated: bool

    def still_valid(self) -> bool: ...


def wrap(
    manager: KVCacheManager,
    plan_of: Callable[[str], Adoption | None],
    claimed_in_vain: Callable[[], int],
    refused: Callable[[str], None],
) -> None:
    """Install the wrapper on this instance.

    `plan_of(request_id)` gives the plan made in this pass. `claimed_in_vain()` is how many of the blocks that
    vLLM reserves for prefills in flight belong to requests that fell back: they hold nothing and start
    again, but vLLM goes on counting them, and the first to load again would wait for itself.
    `refused(request_id)` is told when there is no room for a request.
    """
    stock = manager.allocate_slots

    def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        if reserved := kwargs.get("reserved_blocks", 0):
            kwargs["reserved_blocks"] = max(reserved - claimed_in_vain(), 0)
        plan = plan_of(request.request_id)
        external = kwargs.get("num_external_computed_tokens", 0)
        # The scheduler may have dropped our answer since (it then asks for other numbers): no adoption.
        if plan is not None and (external != plan.external_tokens or not kwargs.get("delay_cache_blocks")):
            plan = None
        if plan is not None:
            if not plan.still_valid():
                return None  # the scheduler tries again in its next pass, and gets a new plan
            local = kwargs["new_computed_blocks"].blocks[0]
            kwargs["new_computed_blocks"] = manager.create_kv_cache_blocks(([*local, *plan.blocks],))
            kwargs["num_new_computed_tokens"] += plan.tokens
            kwargs["num_external_computed_tokens"] = external - plan.tokens
        blocks = stock(request, *args, **kwargs)
        if plan is not None:
            plan.allocated = blocks is not None
        if blocks is None:
            refused(request.request_id)
        return blocks

    manager.allocate_slots = allocate_slots  # type: ignore[method-assign]
