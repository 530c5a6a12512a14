"""Bugs that are vLLM's or the stock connector's: what they look like, and a way round one that hides ours."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from .groups import kinds
from .violation import Crash, Failure, Stuck, Violation

if TYPE_CHECKING:
    from .world import World

PREEMPTED_BLOCK = (
    "priority policy: a request that is scheduled and then preempted in the same pass leaves blocks in the"
    " prefix cache that were never computed (vLLM 57580)"
)
BROKEN_KEY = "recompute policy: a key that always fails is looked up and loaded for ever"
RESERVED_BY_EACH_OTHER = (
    "recompute policy, small pool: what is reserved for requests whose load has failed keeps them out"
)
RESET_RUNNING = (
    "reset_prefix_cache(reset_running_requests=True): what the next pass plans for a preempted request is"
    " thrown away, so that it waits for ever, or build_connector_meta fails"
)
SHORT_READ = "a Get that brings too few bytes counts as complete"
LOST_THREAD = "an exception that is no Exception ends the receive thread, and its load is never reported"

PADDING_SAVED = (
    "speculative decoding: a request with one token to compute is padded with drafts, which are saved too."
    " Where they fill a block, it is saved under the hash of the tokens that come instead; if there is no"
    " hash yet, the save thread asserts and the save is lost"
)
PREEMPTING_EACH_OTHER = (
    "small pool: two requests preempt each other for ever, since what one gives back is not free yet (a save"
    " or a forward on its way holds it)"
)
RESERVED_TOO_LITTLE = (
    "windowed groups, small pool: what is reserved for loads in flight takes a table's null blocks for blocks"
    " held, so that complete loads fill the pool and none has room to go on"
)
NO_KEY_AT_CHUNK = (
    "chunked local attention: a lookup whose hit ends where a chunk does asserts that the chunked group has a"
    " key there, which it need not"
)
NEVER_IDLE = (
    "SimpleCPUOffloadConnector, lazy_offload, CPU memory smaller than what the GPU has cached: idle, it"
    " copies in a circle for ever"
)
OF_VLLM = (PREEMPTED_BLOCK, PREEMPTING_EACH_OTHER, RESERVED_TOO_LITTLE, NO_KEY_AT_CHUNK)
OF_STOCK = (
    *OF_VLLM,
    BROKEN_KEY,
    RESERVED_BY_EACH_OTHER,
    RESET_RUNNING,
    SHORT_READ,
    LOST_THREAD,
    PADDING_SAVED,
    NEVER_IDLE,
)


MANY_PREEMPTIONS = 100
"""Of one request in a run: two that only get in each other's way a while take a handful."""


def heal(scheduler: Any) -> None:
    """Take blocks that will not be computed out of the prefix cache when a request is preempted
    (`PREEMPTED_BLOCK`)."""
    stock, manager, size = scheduler._preempt_request, scheduler.kv_cache_manager, scheduler.block_size

    def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
        computed = request.num_computed_tokens // size
        for blocks in manager.get_block_ids(request.request_id):
            manager.evict_blocks(set(blocks[computed:]))
        stock(request, *args, **kwargs)

    scheduler._preempt_request = preempt


def explain(failure: Failure, world: World) -> str | None:
    """The known bug behind this failure, if there is one."""
    setup, text = world.setup, str(failure)
    waiting = [r for r in world.scheduler.requests.values() if not r.is_finished()]
    stuck = isinstance(failure, Stuck)
    rounds = sum(request.num_preemptions > MANY_PREEMPTIONS for request in waiting)
    if stuck and not world.scheduler.requests and setup.lazy:
        return NEVER_IDLE
    if stuck and rounds > 1:
        return PREEMPTING_EACH_OTHER
    if "in the prefix cache but wrong" in text and setup.policy == "priority" and not setup.heal:
        return PREEMPTED_BLOCK
    if stuck and len(kinds(setup)) > 1 and _complete_but_without_room(world):
        return RESERVED_TOO_LITTLE
    if isinstance(failure, Crash) and "_tail_key_boundaries" in _raised_in(failure):
        return NO_KEY_AT_CHUNK
    if stuck and setup.recompute and any(world.loop.shelf.failed[r.request_id] for r in waiting):
        return RESERVED_BY_EACH_OTHER  # ours cannot know of another connector's failures
    if setup.mode in ("attach", "park"):
        return None
    if any(lane.dead for worker in world.workers for lane in worker.lanes):
        return LOST_THREAD
    if world.loop.short_reads and not isinstance(failure, Crash):
        return SHORT_READ
    if setup.drafts and isinstance(failure, Violation):
        return PADDING_SAVED
    if world.loop.reset_running and (stuck or isinstance(failure, Crash)):
        return RESET_RUNNING
    if stuck and setup.recompute and any(world.failed_gets[r.request_id] > 10 for r in waiting):
        return BROKEN_KEY
    if stuck and setup.recompute and any(world.failed_gets[r.request_id] for r in waiting):
        return RESERVED_BY_EACH_OTHER
    return None


def _complete_but_without_room(world: World) -> bool:
    """Nothing runs or loads, and first of those that hold blocks is one whose load is complete."""
    queue = world.scheduler.kv_holding_waiting
    if world.scheduler.running or world.loads or not queue:
        return False
    first = queue.peek_request()
    return first.num_computed_tokens > 0 and first.status.name in ("WAITING", "PREEMPTED")


def _raised_in(failure: Failure) -> set[str]:
    """The functions that an exception has come through."""
    cause = failure.__cause__
    return {frame.name for frame in traceback.extract_tb(cause.__traceback__)} if cause is not None else set()
