"""Scheduler side of attach mode: plan, adopt, publish, fall back.

vLLM's order in one pass, and ours inside it:

    get_num_new_matched_tokens -> match():      which blocks are pending, what is our own suffix? a plan;
                                                asked any number of times, changes nothing shared
    allocate_slots             -> allocation.py: adopts the plan's blocks
    update_state_after_alloc   -> allocated():  the claim: attach to flights, lead the own suffix
    build_connector_meta       -> acknowledgements(): deadlines; who must be let go through the worker
    update_connector_output    -> output():     loads ended: publish, decide who is finished

A request in WAITING_FOR_REMOTE_KVS has a `_Pending` record and is reported to vLLM as received exactly
once: when nothing writes into its own blocks any more and it waits for no flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm import envs

from singleflight.estimate import Forecast
from singleflight.stats import Outcome, Reason
from singleflight.table import Left, PendingBlockTable, Publish, Segment

from . import allocation
from .config import Config, OnDeadline

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class Plan:
    """What a request would adopt; made by `match`, used by the allocator, claimed by `allocated`."""

    blocks: list[KVCacheBlock]
    segments: list[Segment]
    tokens: int
    """Tokens in the adopted blocks."""
    external_tokens: int
    """Adopted and own external tokens together: what vLLM was told."""
    made_at: float
    """When the table was asked; the claim in the same pass is made as of then."""
    allocated: bool = False

    def still_valid(self) -> bool:
        return all(segment.flight.joinable for segment in self.segments)


@dataclass(slots=True)
class _Pending:
    """A request in WAITING_FOR_REMOTE_KVS."""

    request: Request
    loading: bool = False
    """The worker has a load of its own for it, not reported yet."""
    failed: bool = False
    """That load has failed, as far as is known."""
    waiting: bool = False
    """It follows a flight that has not landed."""
    generation: int | None = None
    """The flight it leads, if any."""
    loaded_tokens: int = 0
    """Prefix length once its own load is complete."""
    fell_back: bool = False
    """It starts again, in other blocks, once it is settled."""
    gone: bool = False
    """vLLM has finished it and waits for our report to free its blocks."""
    acknowledging: bool = False
    """The worker has been asked to report it."""

    @property
    def settled(self) -> bool:
        return not self.loading and not self.waiting


@dataclass(slots=True)
class _Restart:
    """A request that fell back and has not been allocated anything since."""

    request: Request
    refused: bool = False
    """There was no room for it."""
    stepped_back: bool = False


class AttachScheduler:
    """One per engine; called by the scheduler's thread only."""

    def __init__(
        self,
        stock: MooncakeStoreScheduler,
        manager: KVCacheManager,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # As many loads at a time as the worker has receive threads.
        self.table = PendingBlockTable(config.policy, Forecast(envs.VLLM_MOONCAKE_LOAD_RECV_THREADS))
        self._on_deadline = config.on_deadline
        self._stock = stock
        self._manager = manager
        self._pool = manager.block_pool
        self._block_size: int = stock._block_size
        self._clock = clock
        self._plans: dict[str, Plan] = {}
        self._pending: dict[str, _Pending] = {}
        self._to_acknowledge: set[str] = set()
        # Requests that load nothing any more. A failed load is answered with 0 from then on, or vLLM
        # would look up and load the same broken key for ever (vllm-facts: 608 Gets in 4 s).
        self._no_load: set[str] = set()
        self._restarting: dict[str, _Restart] = {}
        self._allocated: set[str] = set()  # in this pass
        allocation.wrap(manager, self._plans.get, self._claimed_in_vain, self._refused)

    # -- one scheduling pass -----------------------------------------------------------------------------

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """External tokens beyond the local hit: adopted ones first, then our own suffix.

        (None, False) asks vLLM to ask again: an asynchronous lookup is not ready. Where waiting is not
        expected to pay, the answer is the stock connector's, and the load may be joined by others.
        """
        request_id = request.request_id
        self._plans.pop(request_id, None)
        restart = self._restarting.get(request_id)
        if restart is not None and restart.refused and not restart.stepped_back:
            # vLLM has kept its place before requests whose loads are complete: they would wait for room that
            # only they can make. Asked to ask again, it goes back to those that hold nothing.
            restart.stepped_back = True
            return None, False
        if request_id in self._no_load or request.skip_reading_prefix_cache:
            return 0, False
        now = self._clock()
        if len(self.table):
            self._carry_out(self.table.expire(now))  # or it could join a flight that has just become overdue
        first = num_local_tokens // self._block_size
        # The last token is always computed, so a prompt of full blocks adopts all but its last.
        stop = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_size)
        blocks, segments = self._adoptable(request, first, stop, now)
        if not segments:
            return self._stock.get_num_new_matched_tokens(request, num_local_tokens)

        end = first + len(blocks)
        tokens = len(blocks) * self._block_size
        own = 0
        suffix_unknown = end < stop and not segments[-1].known_miss(request.block_hashes[end])
        if suffix_unknown or not self.table.worth_joining(segments, len(blocks), now):
            answer, is_async = self._stock.get_num_new_matched_tokens(request, num_local_tokens)
            if answer is None:
                return None, False
            alone = answer // self._block_size
            if answer >= tokens and not self.table.worth_joining(segments, alone, now):
                return answer, is_async
            own = max(answer - tokens, 0)
        else:
            # Asked in an earlier pass (lookup_async): by the time this wait is over, an old answer.
            self._stock.client.discard(request_id)
        if own:
            self._stock.load_specs[request_id].vllm_cached_tokens = end * self._block_size
        else:
            self._stock.load_specs.pop(request_id, None)
        self._plans[request_id] = Plan(blocks, segments, tokens, tokens + own, now)
        return tokens + own, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has allocated: the moment to claim. `blocks` are all of the request's blocks."""
        self._restarting.pop(request.request_id, None)
        self._allocated.add(request.request_id)
        plan = self._plans.pop(request.request_id, None)
        if plan is not None and not plan.allocated:
            plan = None
        adopted = plan.tokens if plan is not None else 0
        self._stock.update_state_after_alloc(request, blocks, num_external_tokens - adopted)
        if num_external_tokens == 0:
            return
        now = plan.made_at if plan is not None else self._clock()
        pending = self._pending[request.request_id] = _Pending(request)
        if plan is not None:
            self.table.attach(request.request_id, plan.segments, now)
            pending.waiting = True
        spec = self._stock.load_specs.get(request.request_id)
        if spec is not None and spec.can_load:
            pending.loading = True
            pending.loaded_tokens = spec.kvpool_cached_tokens
            self._lead(pending, blocks, spec.vllm_cached_tokens // self._block_size, now)

    def still_preempted(self, preempted: set[str]) -> set[str]:
        """Those of the preempted that have not been allocated again in this pass.

        After reset_prefix_cache(reset_running_requests=True) vLLM names them in the very pass that may have
        planned a new load for them; the stock connector would throw that load away, and they would wait
        for it for ever.
        """
        return preempted - self._allocated

    def acknowledgements(self) -> set[str]:
        """End of the pass: deadlines; then who the worker must report in its next output."""
        self._allocated.clear()
        self._carry_out(self.table.expire(self._clock()))
        ids, self._to_acknowledge = self._to_acknowledge, set()
        return ids

    # -- what the worker reports -------------------------------------------------------------------------

    def output(self, out: KVConnectorOutput) -> None:
        """Before vLLM reads `out.finished_recving`: land and fail flights, then decide who is finished."""
        # The worker may report a failure steps before the end of the same load, never after it.
        for request_id in out.failed_recving:
            if request_id in self._pending:
                self._pending[request_id].failed = True
        reported = set(out.finished_recving or ())
        touched = set(reported)
        effects: list[Left] = []
        for request_id in sorted(reported):
            pending = self._pending.get(request_id)
            if pending is None:
                continue
            if pending.acknowledging:
                pending.acknowledging = False
                continue
            pending.loading = False
            if pending.failed and not pending.gone:  # under policy "fail" vLLM has finished it by now
                self._no_load.add(request_id)
                effects += self.table.detach(request_id)
            if pending.generation is not None:
                effects += self.table.fail(pending.generation) if pending.failed else self._land(pending)
                pending.generation = None
        touched |= self._carry_out(effects)
        # Not ours to hold: reports of requests without a record stay as they are.
        held = {r for r in reported if r in self._pending and not self._pending[r].settled}
        finished = (reported - held) | {r for r in touched if self._settle(r)}
        if finished != reported:
            out.finished_recving = finished

    # -- requests and operators --------------------------------------------------------------------------

    def finished(self, request_id: str, aborted: bool = False) -> None:
        """vLLM has finished or aborted the request (which of them is no matter here: a load in the air runs
        on and is of use)."""
        self._plans.pop(request_id, None)
        self._no_load.discard(request_id)
        self._restarting.pop(request_id, None)
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.gone = True
        self._carry_out(self.table.leave(request_id))
        if pending is not None:
            self._acknowledge_if_settled(request_id, pending)

    def reset(self) -> None:
        """The caches are being reset: nothing that is in the air may be served afterwards.

        Followers fall back; so do leaders, once nothing writes into their blocks any more.
        """
        self._plans.clear()
        for request_id in list(self._stock.client.futures):
            self._stock.client.discard(request_id)  # answers from before (lookup_async)
        for pending in self._pending.values():
            pending.fell_back = True
        self._carry_out(self.table.reset())

    # -- inside ------------------------------------------------------------------------------------------

    def _adoptable(
        self, request: Request, first: int, stop: int, now: float
    ) -> tuple[list[KVCacheBlock], list[Segment]]:
        """The run of blocks from `first` that are pending, or are cached behind pending ones."""
        blocks: list[KVCacheBlock] = []
        segments: list[Segment] = []
        if not len(self.table) or not self.table.may_join(request.request_id, now):
            return blocks, segments
        hashes = request.block_hashes
        i = first
        while i < stop:
            if run := self.table.run(hashes, i, stop):
                segments += run
                for segment in run:
                    blocks.extend(segment.destination)
            elif blocks and (cached := self._pool.get_cached_block(hashes[i], [0])):
                # A shorter load has landed behind a longer one: no local hit yet, but no load either.
                blocks += cached
            else:
                break
            i = first + len(blocks)
        return blocks, segments

    def _lead(self, pending: _Pending, blocks: KVCacheBlocks, first: int, now: float) -> None:
        request = pending.request
        end = pending.loaded_tokens // self._block_size
        # The lookup stops before the last token, so only blocks that end before it are known misses.
        asked = (request.num_tokens - 1) // self._block_size
        flight = self.table.lead(
            request.request_id,
            request.block_hashes[first:end],
            blocks.blocks[0][first:end],
            now,
            miss=request.block_hashes[end] if end < min(asked, len(request.block_hashes)) else None,
        )
        pending.generation = flight.generation if flight is not None else None

    def _land(self, leader: _Pending) -> list[Left]:
        """The leader's load is complete: publish its blocks, if they may be; its followers leave."""
        left: list[Left] = []
        assert leader.generation is not None
        for effect in self.table.land(leader.generation, self._clock()):
            if isinstance(effect, Publish):
                # At once, before vLLM frees an aborted leader's blocks.
                self._manager.cache_blocks(leader.request, leader.loaded_tokens)
            else:
                left.append(effect)
        return left

    def _carry_out(self, effects: Iterable[Left]) -> set[str]:
        """Let go of requests that left the table; returns them."""
        return {self._let_go(effect) for effect in effects}

    def _let_go(self, effect: Left) -> str:
        request_id = str(effect.request)
        pending = self._pending[request_id]
        pending.waiting = False
        if effect.outcome is Outcome.FELL_BACK:
            pending.fell_back = True
            late = effect.reason is Reason.DEADLINE
            if (
                self._on_deadline is OnDeadline.RECOMPUTE
                if late
                else not self.table.may_join(request_id, self._clock())
            ):
                # Late: a stalled load path would stall its own Get too. Out of hand-overs: its own Get
                # would be one of a stampede. Both compute the prefix locally.
                self._no_load.add(request_id)
        self._acknowledge_if_settled(request_id, pending)
        return request_id

    def _acknowledge_if_settled(self, request_id: str, pending: _Pending) -> None:
        if pending.settled and not pending.acknowledging:
            pending.acknowledging = True
            self._to_acknowledge.add(request_id)

    def _settle(self, request_id: str) -> bool:
        """Hand a settled request back to vLLM; True if it is to be reported as received now."""
        pending = self._pending.get(request_id)
        if pending is None or not pending.settled:
            return False
        del self._pending[request_id]
        self._to_acknowledge.discard(request_id)
        if pending.fell_back and not pending.gone:
            # vLLM then takes it for a fresh waiting request, under either kv_load_failure_policy.
            self._manager.free(pending.request)
            pending.request.num_computed_tokens = 0
            self._restarting[request_id] = _Restart(pending.request)
        return True

    def _claimed_in_vain(self) -> int:
        waiting = (restart.request for restart in self._restarting.values())
        return sum(-(-request.num_tokens // self._block_size) for request in waiting)

    def _refused(self, request_id: str) -> None:
        if request_id in self._restarting:
            self._restarting[request_id].refused = True
