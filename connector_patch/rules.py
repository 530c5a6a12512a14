"""The rules that attach and park mode share: who asks, who waits, whose load has failed, who loads no more.

vLLM's order in one pass, and ours inside it:

    get_num_new_matched_tokens -> match():       which blocks are pending, what is the request's own suffix?
                                                 asked any number of times
    get_loaded_kv_cache_group_ids -> chosen():   it is our answer that counts; then vLLM allocates
    update_state_after_alloc   -> allocated():   the claim: lead the own load
    build_connector_meta       -> acknowledgements(): who must be reported; is a deadline due?
    update_connector_output    -> output():      loads have ended: land and fail flights; then deadlines

What differs between the modes is in `attach.py` and `park.py`: what joining means, and what is done for a
request that has left the table.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from singleflight.core.choice import Chosen
from singleflight.core.estimate import Forecast
from singleflight.core.stats import Outcome, Reason
from singleflight.core.table import Left, PendingBlockTable, Publish, Segment

from .choice import Chooser, Heard
from .config import Config, OnDeadline
from .health import Health
from .store import Answer
from .windows import Windows

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .store import Store

TICK = "\0kv-singleflight: a deadline is due"
"""No request. The worker is asked to report it as received, and followers are let go for their deadline only
then: what the worker has to report is heard first. So a load that has landed while the engine was paused
(`pause_generation`, a weight update) counts as landed."""
ASK_AGAIN: Answer = (None, False)
NOTHING: Answer = (0, False)
NOBODY: frozenset[str] = frozenset()


@dataclass(slots=True)
class Load:
    """A request's own load that the worker has not reported yet."""

    request: Request
    blocks: range
    """What it loads, by number in the request; once it has failed, what is there of that."""
    generation: int | None
    """The flight that it is; None if it was not registered."""
    started: float
    """Seconds on the driver's clock."""
    failed: bool = False
    """As far as is known: a failure may be reported steps before the end of the same load, never after."""
    there: int | None = None
    """The fewest of its first blocks that a rank has told to be there, after a failure."""
    ended: float | None = None
    """When it was complete; None if it failed."""
    gone: bool = False
    """vLLM has finished or aborted the request."""


@dataclass(slots=True)
class Run:
    """Blocks from a request's local hit on that others are loading."""

    segments: list[Segment]
    first: int
    """The number of its first block in the request."""
    end: int
    """One past its last."""

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def destination(self) -> list[Any]:
        """What holds each of its blocks (`windows.held`). Made when it is asked for: few lookups are followed
        by an allocation, and only windows matter before."""
        return [block for segment in self.segments for block in segment.destination]

    def before(self, end: int) -> Run:
        """The run up to the request's block `end`."""
        segments, length = [], end - self.first
        for segment in self.segments:
            if length > 0:
                segments.append(segment._replace(length=min(segment.length, length)))
            length -= segment.length
        return Run(segments, self.first, end)


class Rules(Heard, ABC):
    """One per engine; called by the scheduler's thread only."""

    loads_rest_after_wait: bool
    """Whether a follower's own suffix starts to load only after its wait."""

    def __init__(
        self,
        store: Store,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        windows: Windows | None = None,
        chooser: Chooser | None = None,
    ) -> None:
        policy = config.policy_for(store.block_size)
        self._windows = windows or Windows()
        self.table = PendingBlockTable(policy, Forecast(store.parallel_loads), chained=True)
        self.health = Health(policy, self.table.stats)
        self.chooser = chooser
        """Whether to load or to compute; None where everybody loads."""
        if chooser is not None:
            chooser.waiters = self._waiters
        self._store = store
        self._block_size = store.block_size
        self._on_deadline = config.on_deadline
        self._clock = clock
        self._loads: dict[str, Load] = {}
        # Requests that load nothing any more, until they are preempted: their preemptions so far. A failed
        # load is answered with 0 from then on, or vLLM would look up and load the same broken key for ever
        # (vllm-facts: 608 Gets in 4 s).
        self._no_load: dict[str, int] = {}
        self._allocated: set[str] = set()  # in this pass
        self._ticked_at: float | None = None  # when the worker was asked for TICK, until it answers

    # -- one scheduling pass -----------------------------------------------------------------------------

    def match(self, request: Request, num_local_tokens: int) -> Answer:
        """External tokens beyond the local hit.

        (None, False) asks vLLM to ask again. Where waiting for others is not expected to pay, the answer is
        the store's, and the load may be joined by others.
        """
        known = self._known_answer(request, num_local_tokens)
        if known is not None:
            return known
        if not len(self.table):
            return self._alone(request, num_local_tokens, self._ask(request, num_local_tokens))
        now = self._clock()
        self._judge(now)  # or it could join a flight that has just become overdue
        first = num_local_tokens // self._block_size
        # Nobody waits for a block known to be broken: of a failed load, the end may not be reported yet.
        stop = self._readable(request, first, self._asked(request))
        run = self._pending_run(request, first, stop) if self._may_join(request.request_id, now) else None
        if run is None or not run.segments:
            return self._alone(request, num_local_tokens, self._ask(request, num_local_tokens))
        if not self.health.waiting_pays(now):
            # As at a deadline, only at once.
            if self._on_deadline is OnDeadline.RECOMPUTE:
                return NOTHING
            return self._alone(request, num_local_tokens, self._ask(request, num_local_tokens))

        segments, shared, own = run.segments, len(run), 0
        found = self._found(request, run)
        suffix_unknown = found < stop and not segments[-1].known_miss(request.block_hashes[found])
        settled = not suffix_unknown and self._windows.covered(run) and not self._store.asked_first
        if not settled or not self.table.worth_joining(segments, shared, now):
            answer, is_async = self._ask(request, num_local_tokens, shared * self._block_size)
            if answer is None:
                return ASK_AGAIN
            alone = answer // self._block_size
            if (end := self._windows.adoptable(run, first + alone)) < run.end:
                run = run.before(end)
                segments, shared = run.segments, len(run)
                if not shared:
                    of_store = self._store.alone(request, num_local_tokens, (answer, is_async))
                    return self._alone(request, num_local_tokens, of_store)
            own = max(answer - shared * self._block_size, 0)
            after = own // self._block_size if self.loads_rest_after_wait else 0
            if alone >= shared:
                if not self.table.worth_joining(segments, alone, now, then=after):
                    of_store = self._store.alone(request, num_local_tokens, (answer, is_async))
                    return self._alone(request, num_local_tokens, of_store)
                found = max(found, run.end + 1)
        if self._store.drops_last and found <= run.end:  # stock's hit would end here too
            run = run.before(run.end - 1)
            if not run.segments:
                self._store.withdraw(request.request_id)
                return NOTHING
        return self._join(request, run, own, now)

    @abstractmethod
    def chosen(self, request_id: str) -> None:
        """Of all connectors vLLM has chosen ours to load for the request, and allocates next."""

    @abstractmethod
    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has allocated: the moment to claim. `blocks` are all of the request's blocks."""

    def still_preempted(self, preempted: set[str]) -> set[str]:
        """Those of the preempted that have not been allocated again in this pass.

        After reset_prefix_cache(reset_running_requests=True) vLLM names them in the very pass that may have
        planned a new load for them; the stock connector would throw that load away, and they would wait
        for it for ever.
        """
        return preempted - self._allocated

    def acknowledgements(self) -> Set[str]:
        """End of the pass: who the worker must report in its next output."""
        if self._allocated:
            self._allocated.clear()
        if self._ticked_at is None and self.table.due(now := self._clock()):
            self._ticked_at = now
            return {TICK}
        return NOBODY

    # -- what the worker reports -------------------------------------------------------------------------

    def loading(self, request_id: str) -> bool:
        """Whether the worker has a load of the request's own to report."""
        return request_id in self._loads

    def unreported(self, request_id: str) -> bool:
        """Whether vLLM is still to be told that the request has received what it waits for."""
        return self.loading(request_id)

    def adopted_tokens(self, request_id: str) -> int:
        """Of what this pass has given the request as external tokens, those that others load."""
        return 0

    @abstractmethod
    def output(self, out: KVConnectorOutput) -> None:
        """Before vLLM reads `out.finished_recving`."""

    def _nothing_told(self, out: KVConnectorOutput) -> bool:
        """No load has ended or failed; nor has the worker been asked for anything."""
        if out.finished_recving or out.failed_recving or getattr(out, "kv_connector_worker_meta", None):
            return False
        if self.chooser is not None:
            self.chooser.reported((), self._clock())
        return True

    def _take_tick(self, out: KVConnectorOutput) -> float | None:
        """When the TICK in this output was asked for, if there is one; vLLM must not see it."""
        if TICK not in (out.finished_recving or ()):
            return None
        assert out.finished_recving is not None
        out.finished_recving = out.finished_recving - {TICK}
        asked, self._ticked_at = self._ticked_at, None
        return asked

    def _expire(self, as_of: float | None) -> set[str]:
        """Let go of followers whose deadline had passed then; returns them."""
        if as_of is None:
            return set()
        self._judge(as_of)
        return self._carry_out(self.table.expire(as_of))

    def _end_loads(self, out: KVConnectorOutput) -> set[str]:
        """Land and fail what has ended; returns the requests that have left the table by it."""
        for request_id, blocks in self._store.there(out).items():
            if (load := self._loads.get(request_id)) is not None:
                load.there = blocks if load.there is None else min(load.there, blocks)
        for request_id, block in self._store.broken(out).items():
            if (load := self._loads.get(request_id)) is not None:
                # At once: under policy "fail" the next request may come before the end is reported.
                self.health.unreadable(load.request.block_hashes[load.blocks.start + block], self._clock())
        for request_id in out.failed_recving:
            if request_id in self._loads:
                self._loads[request_id].failed = True
        if self.chooser is not None:
            ended = [r for r in out.finished_recving or () if r in self._loads]
            failed = any(self._loads[r].failed for r in ended)
            self.chooser.reported(ended, self._clock(), failed=failed)
        effects: list[Left] = []
        for request_id in sorted(out.finished_recving or ()):
            if (load := self._loads.pop(request_id, None)) is not None:
                self._learn(load)
                effects += self._failed(load) if load.failed else self._complete(load)
        return self._carry_out(effects)

    def _complete(self, load: Load) -> list[Left]:
        load.ended = self._clock()
        return self._land(load) if load.generation is not None else []

    def _failed(self, load: Load) -> list[Left]:
        """The blocks before the first bad one land. The request goes on from there, as where vLLM is told of
        bad blocks: it keeps all of its blocks, and computes into the rest.

        Where windows at that block are not there, nothing is: the request starts again."""
        planned, there = load.blocks.stop, load.there or 0
        load.blocks = load.blocks[:there]
        resumes = self._windows.serve(planned, load.blocks.stop)
        if not resumes:
            there, load.blocks = 0, load.blocks[:0]
        if not load.gone:  # under policy "fail" vLLM has finished it by now
            self._load_no_more(load.request)
            load.request.num_computed_tokens = load.blocks.stop * self._block_size if resumes else 0
        if load.generation is None:
            return []
        if not there:
            return self.table.fail(load.generation, self._clock())
        return self.table.cut(load.generation, there, self._clock()) + self._land(load)

    def _land(self, load: Load) -> list[Left]:
        """The load is complete: publish its blocks, if they may be; its followers leave."""
        left: list[Left] = []
        assert load.generation is not None
        complete = load.ended is not None
        for effect in self.table.land(load.generation, self._clock(), ended=load.ended, learn=complete):
            if isinstance(effect, Publish):
                self._publish(load)
            else:
                left.append(effect)
        return left

    # -- requests and operators --------------------------------------------------------------------------

    @abstractmethod
    def finished(self, request_id: str, aborted: bool = False) -> None:
        """vLLM has finished or aborted the request."""

    def reset(self) -> None:
        """The caches are being reset: nothing that is in the air may be served afterwards."""
        self._store.withdraw_answers()
        self.health.broken.clear()
        self._carry_out(self.table.reset(self._clock()))
        self._no_load.clear()  # what was wrong with the store may be gone with what was in it

    # -- what the modes do differently -------------------------------------------------------------------

    def _may_join(self, request_id: str, now: float) -> bool:
        """Whether the request has hand-overs and time left."""
        return self.table.may_join(request_id, now)

    def _known_answer(self, request: Request, num_local_tokens: int) -> Answer | None:
        """The answer for a request that needs neither the table nor the store; None for any other."""
        no_more = self._no_load.get(request.request_id) == request.num_preemptions
        return NOTHING if no_more or request.skip_reading_prefix_cache else None

    @abstractmethod
    def _pending_run(self, request: Request, first: int, stop: int) -> Run:
        """What the request could wait for, of its blocks [first, stop)."""

    @abstractmethod
    def _join(self, request: Request, run: Run, own_tokens: int, now: float) -> Answer:
        """The request waits for the run, and has `own_tokens` of its own to load behind it."""

    @abstractmethod
    def _publish(self, load: Load) -> None:
        """Make a landed load's blocks local prefix-cache hits."""

    @abstractmethod
    def _waiter(self, request_id: str) -> Request:
        """The request that has just left the table."""

    @abstractmethod
    def _left(self, request_id: str, outcome: Outcome) -> None:
        """The request waits for nothing any more."""

    # -- inside ------------------------------------------------------------------------------------------

    def _ask(self, request: Request, num_local_tokens: int, pending: int = 0) -> Answer:
        """The store's answer, but for what is behind a block that could not be read lately."""
        first = num_local_tokens // self._block_size
        if first < len(request.block_hashes) and self._readable(request, first, first + 1) == first:
            self._store.withdraw(request.request_id)
            return NOTHING
        answer, is_async = self._store.ask(request, num_local_tokens, pending)
        if answer is None and self._put_off_for_what_is_late(request, first + pending // self._block_size):
            return NOTHING
        if not answer:
            return answer, is_async
        stop = first + answer // self._block_size
        end = self._readable(request, first, stop)
        if end < stop and self._windows:
            # Whether the store has the windows at an earlier end, it has not said.
            self._store.withdraw(request.request_id)
            return NOTHING
        if end < stop:
            self._store.cut(request.request_id, end * self._block_size)
            answer = (end - first) * self._block_size
        return answer, is_async

    def _alone(self, request: Request, num_local_tokens: int, answer: Answer) -> Answer:
        """The answer for a request that waits for nobody: it loads what the store has, or computes it."""
        tokens, is_async = answer
        if self.chooser is None or tokens is None:
            return answer
        if not tokens:
            self.chooser.computes_anyway(request, num_local_tokens)
            return answer
        if not is_async:
            return answer
        if self.chooser.choose(request, num_local_tokens, tokens, self._clock()) is Chosen.LOAD:
            return answer
        self._store.withdraw(request.request_id)
        return ASK_AGAIN if self.chooser.steps_back(request.request_id, self._clock()) else NOTHING

    def _chose(self, request_id: str, num_external_tokens: int, joins: bool = False) -> None:
        """vLLM has allocated: count what the request does."""
        if self.chooser is None:
            return
        chosen, stats = self.chooser.allocated(request_id, num_external_tokens), self.table.stats
        if joins:
            stats.chose_join += 1
        elif chosen is Chosen.LOAD:
            stats.chose_load += 1
        elif chosen is Chosen.COMPUTE:
            stats.chose_compute += 1

    def _waiters(self, request_id: Hashable) -> int:
        """How many wait for this request's load, itself included."""
        flight = self.table.leads(request_id)
        return 1 + (len(flight.followers) if flight is not None else 0)

    def _put_off_for_what_is_late(self, request: Request, first: int) -> bool:
        """Whether the store puts the request off for a load that has outlived its budget, as it would for as
        long as that takes."""
        if not self._store.loads_once:
            return False
        now, table = self._clock(), self.table
        late = [
            load for load in self._loads.values() if now >= load.started + table.budget_s(len(load.blocks))
        ]
        wanted = set(request.block_hashes[first:]) if late else set()
        return any(
            not wanted.isdisjoint(load.request.block_hashes[load.blocks.start : load.blocks.stop])
            for load in late
        )

    def _readable(self, request: Request, first: int, stop: int) -> int:
        """One past the last of the request's blocks [first, stop) before the first known to be broken.

        Whoever may retry after another's failure does: it may have been that load and not the block.
        """
        broken = self.health.broken
        if not len(broken) or self.table.may_retry(request.request_id):
            return stop
        return broken.first(request.block_hashes, first, stop, self._clock())

    def _judge(self, now: float) -> None:
        """Nobody joins what is overdue."""
        if self.table.due(now):
            before = self.table.stats.overdue
            self.table.judge(now)
            self.health.overdue(self.table.stats.overdue - before, now)

    def _learn(self, load: Load) -> None:
        """What the end of a load says about the store."""
        now, blocks = self._clock(), load.blocks
        hashes = load.request.block_hashes[blocks.start : blocks.stop]
        in_time = now - load.started < self.table.budget_s(len(blocks))
        if load.failed:
            self.health.failed(in_time, now)
        else:
            self.health.landed(hashes, in_time)

    def _asked(self, request: Request) -> int:
        """How many of its first blocks a lookup is about.

        The last token is always computed, so a prompt of full blocks is loaded but for its last. Where an
        answer leaves a block out anyway, that one is looked up too.
        """
        tokens = request.num_tokens if self._store.drops_last else request.num_tokens - 1
        return min(len(request.block_hashes), tokens // self._block_size)

    def _found(self, request: Request, run: Run) -> int:
        """One past the last of the request's blocks that is known to be in the store."""
        end, hashes = run.end, request.block_hashes
        dropped = self._store.drops_last and end < len(hashes) and run.segments[-1].known_hit(hashes[end])
        return end + dropped

    def _lead(self, request: Request, load: range, destination: Sequence[Any], now: float) -> None:
        """From here on, the request's load of these blocks may be joined."""
        hashes, end, found = request.block_hashes, load.stop, load.stop + self._store.drops_last
        hit = hashes[end] if found > end else None
        miss = hashes[found] if found < self._asked(request) else None
        # Who loads what is pending already needs windows that the load in the air lacks.
        over, loaded = bool(self._windows), hashes[load.start : end]
        flight = (
            self.table.lead(request.request_id, loaded, destination, now, miss, hit, over=over)
            if loaded  # less than a block is nobody else's
            else None
        )
        if flight is not None:
            self._windows.keep(request, end)
        generation = flight.generation if flight is not None else None
        self._loads[request.request_id] = Load(request, load, generation, now)
        if self.chooser is not None:
            self.chooser.queued(request.request_id, len(load), now)

    def _carry_out(self, effects: Iterable[Left]) -> set[str]:
        """Let go of requests that left the table; returns them."""
        return {self._let_go(effect) for effect in effects}

    def _let_go(self, effect: Left) -> str:
        request_id = str(effect.request)
        if effect.outcome is Outcome.FELL_BACK:
            late = effect.reason is Reason.DEADLINE
            if (
                self._on_deadline is OnDeadline.RECOMPUTE
                if late
                else not self.table.may_join(request_id, self._clock())
            ):
                # Late: a stalled load path would stall its own Get too. Out of hand-overs: its own Get
                # would be one of a stampede. Both compute the prefix locally.
                self._load_no_more(self._waiter(request_id))
        self._left(request_id, effect.outcome)
        return request_id

    def _load_no_more(self, request: Request) -> None:
        self._no_load[request.request_id] = request.num_preemptions
