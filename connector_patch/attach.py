"""Attach mode: a follower adopts the leader's pending blocks as its own.

The rules (`rules.py`), and what is special to adopting:

    match()            -> a plan: which blocks to adopt; changes nothing shared
    chosen()           -> vLLM goes by the plan, not by what another connector has
    allocate_slots     -> allocation.py: adopts the plan's blocks
    allocated()        -> the claim: attach to flights, lead the own suffix
    acknowledgements() -> who must be let go through the worker
    output()           -> publish what has landed, in the order of the prefix; deadlines; who is finished

A request in WAITING_FOR_REMOTE_KVS has a `_Pending` record and is reported to vLLM as received exactly
once: when nothing writes into its own blocks any more and it waits for no flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from singleflight.core.stats import Outcome
from singleflight.core.table import Left

from . import allocation, windows
from .accounting import count_as_local
from .choice import Chooser
from .config import Config
from .matrix import says_who_is_chosen
from .rules import ASK_AGAIN, Load, Rules, Run

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .store import Answer, Store


@dataclass(slots=True)
class Plan:
    """What a request would adopt; made by `match`, used by the allocator, claimed by `allocated`."""

    run: Run
    tokens: int
    """Tokens in the adopted blocks."""
    external_tokens: int
    """Adopted and own external tokens together: what vLLM was told."""
    made_at: float
    """When the table was asked; the claim in the same pass is made as of then."""
    chosen: bool
    """vLLM has taken this answer, not another connector's."""
    allocated: bool = False

    @property
    def blocks(self) -> list[Any]:
        return self.run.destination


@dataclass(slots=True)
class _Pending:
    """A request in WAITING_FOR_REMOTE_KVS."""

    request: Request
    starts_again: bool = False
    """In other blocks, once settled: it fell back, its own load has failed, or the caches were reset."""
    gone: bool = False
    """vLLM has finished it and waits for our report to free its blocks."""
    acknowledging: bool = False
    """The worker has been asked to report it."""


@dataclass(slots=True)
class _Restart:
    """A request that starts again and has not been allocated anything since."""

    request: Request
    refused: bool = False
    """There was no room for it."""
    stepped_back: bool = False


class AttachScheduler(Rules):
    """The rules, for followers that hold the leader's blocks while they wait."""

    loads_rest_after_wait = False

    def __init__(
        self,
        store: Store,
        manager: KVCacheManager,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        chooser: Chooser | None = None,
    ) -> None:
        super().__init__(store, config, clock, windows.Windows.of(manager), chooser)
        self._manager = manager
        self._pool = manager.block_pool
        self._always_chosen = not says_who_is_chosen()  # then there is no other connector: matrix.py
        self._plans: dict[str, Plan] = {}
        self._pending: dict[str, _Pending] = {}
        self._to_acknowledge: set[str] = set()
        self._restarting: dict[str, _Restart] = {}
        self._complete_early: dict[str, Load] = {}  # loads that land once what they stand on has landed
        self._adopted: dict[str, int] = {}  # in this pass: tokens
        allocation.wrap(manager, self._plans.get, self._claimed_in_vain, self._refused)

    # -- one scheduling pass -----------------------------------------------------------------------------

    def match(self, request: Request, num_local_tokens: int) -> Answer:
        self._plans.pop(request.request_id, None)
        return super().match(request, num_local_tokens)

    def chosen(self, request_id: str) -> None:
        if (plan := self._plans.get(request_id)) is not None:
            plan.chosen = True

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        request_id = request.request_id
        self._restarting.pop(request_id, None)
        self._allocated.add(request_id)
        plan = self._plans.pop(request_id, None)
        if plan is not None and not plan.allocated:
            assert not num_external_tokens, "chosen to load, but nobody has said so before the allocation"
            plan = None
        assert plan is None or num_external_tokens, "adopted, but another connector was chosen to load"
        adopted = plan.tokens if plan is not None else 0
        load = self._store.allocated(request, blocks, num_external_tokens - adopted)
        self._chose(request_id, num_external_tokens, joins=plan is not None)
        if num_external_tokens == 0:
            return
        now = plan.made_at if plan is not None else self._clock()
        self._pending[request_id] = _Pending(request)
        if plan is not None:
            self._adopted[request_id] = adopted
            count_as_local(request, adopted)
            self.table.attach(request_id, plan.run.segments, now)
        if load is not None:
            self._lead(request, load, windows.held(blocks, load), now)

    def acknowledgements(self) -> Set[str]:
        if self._adopted:
            self._adopted.clear()
        if self._complete_early:
            for request_id in self._land_in_order():
                self._acknowledge_if_settled(request_id)
        late = super().acknowledgements()
        if not self._to_acknowledge:
            return late
        ids, self._to_acknowledge = self._to_acknowledge, set()
        return ids | late

    def unreported(self, request_id: str) -> bool:
        return request_id in self._pending

    def adopted_tokens(self, request_id: str) -> int:
        return self._adopted.get(request_id, 0)

    # -- what the worker reports -------------------------------------------------------------------------

    def output(self, out: KVConnectorOutput) -> None:
        """Land and fail flights; deadlines; then decide who is finished."""
        if self._nothing_told(out) and not self._complete_early:
            return
        tick = self._take_tick(out)
        reported = set(out.finished_recving or ())
        for request_id in reported:
            if request_id in self._pending:
                self._pending[request_id].acknowledging = False
        touched = reported | self._end_loads(out) | self._land_in_order()
        if tick is not None:
            touched |= self._expire(tick) | self._land_in_order()
        # Not ours to hold: reports of requests without a record stay as they are.
        held = {r for r in reported if r in self._pending and not self._settled(r)}
        finished = (reported - held) | {r for r in touched if self._hand_back(r)}
        if finished != reported:
            out.finished_recving = finished

    # -- requests and operators --------------------------------------------------------------------------

    def finished(self, request_id: str, aborted: bool = False) -> None:
        """Which of the two is no matter: a load in the air runs on and is of use."""
        self._plans.pop(request_id, None)
        self._no_load.pop(request_id, None)
        self._restarting.pop(request_id, None)
        if self.chooser is not None:
            self.chooser.finished(request_id)
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.gone = True
        for loads in (self._loads, self._complete_early):
            if request_id in loads:
                loads[request_id].gone = True
        self._carry_out(self.table.leave(request_id, self._clock()))
        self._acknowledge_if_settled(request_id)

    def reset(self) -> None:
        """Followers fall back; so do leaders, once nothing writes into their blocks any more."""
        self._plans.clear()
        for pending in self._pending.values():
            pending.starts_again = True
        super().reset()

    # -- how adopting differs ----------------------------------------------------------------------------

    def _known_answer(self, request: Request, num_local_tokens: int) -> Answer | None:
        restart = self._restarting.get(request.request_id)
        if restart is not None and restart.refused and not restart.stepped_back:
            # vLLM has kept its place before requests whose loads are complete: they would wait for room that
            # only they can make. Asked to ask again, it goes back to those that hold nothing.
            restart.stepped_back = True
            return ASK_AGAIN
        return super()._known_answer(request, num_local_tokens)

    def _pending_run(self, request: Request, first: int, stop: int) -> Run:
        segments = self.table.run(request.block_hashes, first, stop)
        return Run(segments, first, first + sum(segment.length for segment in segments))

    def _join(self, request: Request, run: Run, own_tokens: int, now: float) -> Answer:
        request_id = request.request_id
        if own_tokens:
            narrowed = self._store.narrow(request_id, run.end * self._block_size, own_tokens)
            if narrowed is None:
                return ASK_AGAIN
            if narrowed < own_tokens and self._windows:
                # The hit ends earlier than the answer said, so it needs other blocks of the windows.
                end = run.end + narrowed // self._block_size
                if not narrowed or self._windows.adoptable(run, end) < run.end:
                    local = run.first * self._block_size
                    run, narrowed = run.before(self._windows.standing(run)), 0
                    if not run.segments:
                        return self._alone(request, local, self._ask(request, local))
            own_tokens = narrowed
        if not own_tokens:
            self._store.withdraw(request_id)
        tokens = len(run) * self._block_size
        self._plans[request_id] = Plan(run, tokens, tokens + own_tokens, now, chosen=self._always_chosen)
        return tokens + own_tokens, True

    def _land(self, load: Load) -> list[Left]:
        """Not before the block that it stands on is published: nobody is told of a block whose parent nobody
        knows."""
        if self._stands_on_published(load):
            return super()._land(load)
        self._complete_early[load.request.request_id] = load
        return []

    def _publish(self, load: Load) -> None:
        """At once, before vLLM frees an aborted leader's blocks. Those are of no use where others have loaded
        or computed the same ones meanwhile."""
        if load.gone and self._shown(load.request, load.blocks.stop - 1):
            return
        self._manager.cache_blocks(load.request, load.blocks.stop * self._block_size)

    def _waiter(self, request_id: str) -> Request:
        return self._pending[request_id].request

    def _left(self, request_id: str, outcome: Outcome) -> None:
        if outcome is Outcome.FELL_BACK:
            self._pending[request_id].starts_again = True
        self._acknowledge_if_settled(request_id)

    # -- inside ------------------------------------------------------------------------------------------

    def _settled(self, request_id: str) -> bool:
        """Nothing writes into its own blocks, what it has loaded has landed, and it waits for nobody."""
        return (
            request_id not in self._loads
            and request_id not in self._complete_early
            and not self.table.waiting(request_id)
        )

    def _stands_on_published(self, load: Load) -> bool:
        return load.blocks.start == 0 or self._shown(load.request, load.blocks.start - 1)

    def _shown(self, request: Request, block: int) -> bool:
        """Whether the prefix cache has this block of the request, wherever."""
        return self._pool.get_cached_block(request.block_hashes[block], [self._windows.full]) is not None

    def _land_in_order(self) -> set[str]:
        """Land complete loads as soon as what they stand on has landed, and give up those for which that will
        not be: their requests have fallen back, or are gone and nobody else holds the blocks.

        Returns the requests that this concerns.
        """
        touched: set[str] = set()
        while over := [load for load in self._complete_early.values() if not self._keeps_waiting(load)]:
            for load in over:
                assert load.generation is not None
                touched.add(load.request.request_id)
                del self._complete_early[load.request.request_id]
                effects = (
                    super()._land(load)
                    if self._stands_on_published(load)
                    else self.table.fail(load.generation, self._clock(), charged=False)
                )
                touched |= self._carry_out(effects)
        return touched

    def _keeps_waiting(self, load: Load) -> bool:
        if self._stands_on_published(load):
            return False
        if load.gone:
            assert load.generation is not None
            return self.table.followers(load.generation) > 0
        return self.table.waiting(load.request.request_id)

    def _acknowledge_if_settled(self, request_id: str) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and self._settled(request_id) and not pending.acknowledging:
            pending.acknowledging = True
            self._to_acknowledge.add(request_id)

    def _hand_back(self, request_id: str) -> bool:
        """Hand a settled request back to vLLM; True if it is to be reported as received now."""
        pending = self._pending.get(request_id)
        if pending is None or not self._settled(request_id):
            return False
        del self._pending[request_id]
        self._to_acknowledge.discard(request_id)
        if (pending.starts_again or not pending.request.num_computed_tokens) and not pending.gone:
            # vLLM then takes it for a fresh waiting request, under either kv_load_failure_policy.
            self._manager.free(pending.request)
            pending.request.num_computed_tokens = 0
            self._restarting[request_id] = _Restart(pending.request)
        return True

    def _claimed_in_vain(self) -> int:
        lengths = [restart.request.num_tokens for restart in self._restarting.values()]
        groups = self._manager.coordinator.single_type_managers
        return sum(allocation.most_blocks(group, tokens) for group in groups for tokens in lengths)

    def _refused(self, request_id: str) -> None:
        if request_id in self._restarting:
            self._restarting[request_id].refused = True
