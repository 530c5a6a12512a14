"""One engine: its steps, whom it admits, and what a step takes.

The order of vLLM 0.32's `Scheduler.schedule` under its default policy (first come, first served):

1. Whoever decodes gets a token. Then the one prefill that the last budget has cut, if there is one.
2. While there is budget and a seat: requests whose loads have ended, in the order in which these were
   allocated; then those that hold nothing, in order of arrival. One that is to load is given its blocks and
   waits outside the seats. The first that does not fit ends the pass.
3. The step runs. Loads that have ended by its end are told to the scheduler then, and so count from the next
   step on. A step that computes nothing lasts `idle_step`, and what ends meanwhile is told one step later.

Three things are simpler than in vLLM. Output has a given length, and each decoding request brings one token a
step. A request takes the blocks of its whole output together with its seat, so nobody is preempted. And a
request that has waited in vain starts again as the next of those that hold nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from singleflight.twin.arrivals import Arrivals
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance
from singleflight.twin.modes import Match, Stock
from singleflight.twin.pool import UNASKED, Pool
from singleflight.twin.prompts import Prompts
from singleflight.twin.store import Clock, Store
from singleflight.twin.threads import Get, Threads


@dataclass(slots=True)
class Request:
    """What is remembered of one request; the columns of `Outcome`, and where it stands.

    Attributes:
        blocks: GPU blocks it holds, front to back.
        computed: prompt tokens that are there, or will be once its load has ended.
    """

    blocks: list[int]
    computed: int = 0
    first_token: float = math.nan
    admitted: float = math.nan
    local: int = 0
    adopted: int = 0
    loaded: int = 0
    removable: int = 0
    computed_tokens: int = 0


class Engine:
    """Drives one instance from its first request to the end of its last."""

    def __init__(
        self,
        arrivals: Arrivals,
        prompts: Prompts,
        names: Sequence[Sequence[int]],
        figures: Figures,
        instance: Instance,
        clock: Clock,
        pool: Pool,
        store: Store,
        threads: Threads,
        rules: Stock,
    ) -> None:
        self.requests = [Request([]) for _ in names]
        self.gets: list[Get] = []
        self.steps = self.fell_back = 0
        self._prompt: list[int] = arrivals.prompts.tolist()
        self._output: list[int] = arrivals.outputs.tolist()
        self._at_engine: list[float] = prompts.at_engine.tolist()
        self._taking_s: list[float] = prompts.taking_s.tolist()
        self._asked: list[int] = prompts.asked.tolist()
        self._footprint: list[int] = prompts.footprint.tolist()
        self._full: list[int] = prompts.full.tolist()
        self._names = names
        self._figures = figures
        self._size = instance.block_tokens
        self._max_num_seqs = instance.max_num_seqs
        self._synchronous_launch = instance.synchronous_launch
        self._max_tokens = instance.max_num_batched_tokens
        self._clock, self._pool, self._store, self._threads, self._rules = clock, pool, store, threads, rules
        # Requests that hold nothing, those that start again first, each kind in order of arrival.
        self._waiting: list[int] = []
        self._arrived = 0
        self._n_loading = 0
        self._holding = 0  # requests that have been given blocks to load, so far
        self._place = [0] * len(names)  # of each, its number among these
        self._ready: list[tuple[int, int]] = []  # (place, request)
        self._reserved = 0  # blocks that those who load or have loaded will still need
        self._seats = 0
        self._decoding = self._context = 0
        self._cut: int | None = None
        self._ends: list[tuple[int, int, int]] = []  # (last step, number of the seat, request)
        self._seated = 0
        self._loading_by: dict[int, int] = {}  # name -> the request whose load was the first of it in the air

    def run(self) -> None:
        clock, n = self._clock, len(self.requests)
        while True:
            due = clock.now
            while self._arrived < n and self._at_engine[self._arrived] <= due:
                heapq.heappush(self._waiting, n + self._arrived)
                clock.now += self._taking_s[self._arrived]
                self._arrived += 1
            if self._seats or self._waiting or self._n_loading or self._ready:
                self._step()
            elif self._arrived < n:
                clock.now = self._at_engine[self._arrived]
            else:
                return

    # -- one step ----------------------------------------------------------------------------------------

    def _step(self) -> None:
        clock, figures = self._clock, self._figures
        self._tokens = self._pairs = self._before = 0
        self._budget = self._max_tokens - self._decoding
        self._to_put: list[Get] = []
        self._computed: list[int] = []  # blocks' names
        self._first_tokens: list[int] = []
        self._store.next_step()
        decoding, context = self._decoding, self._context
        self._admit()
        tick = self._rules.due()
        busy = decoding > 0 or self._tokens > 0
        if not self._synchronous_launch:
            self._start_loads()
        if busy:
            seconds = (
                figures.step_overhead.value
                + self._tokens / figures.prefill_rate.value
                + self._pairs * figures.attention.value
                + self._before * figures.prefill_context.value
                + decoding * figures.decode_per_request.value
                + context * figures.decode_context.value
            )
            if self._threads.transferring(clock.now):
                seconds *= figures.loading_slowdown.value
            self._threads.slow(figures.computing_slowdown.value, clock.now)
            clock.now += seconds
            self._threads.slow(1.0, clock.now)
            self.steps += 1
            self._end_step(decoding)
        if self._synchronous_launch:
            self._start_loads()
        self._report(tick)
        if not busy:
            clock.now += figures.idle_step.value

    def _start_loads(self) -> None:
        for get in self._to_put:
            get.queued_s = self._clock.now
            self._threads.put(get)

    def _end_step(self, decoding: int) -> None:
        """Tokens are there: decoding requests have one more, prefills that are complete their first."""
        now = self._clock.now
        self._store.put(self._computed, now)
        self._context += decoding
        while self._ends and self._ends[0][0] == self.steps:
            _, _, request = heapq.heappop(self._ends)
            self._decoding -= 1
            self._context -= self._prompt[request] + self._output[request]
            self._finish(request)
        for request in self._first_tokens:
            self.requests[request].first_token = now
            if self._output[request] == 1:
                self._finish(request)
            else:
                self._decoding += 1
                self._context += self._prompt[request] + 1
                self._seated += 1
                last = self.steps + self._output[request] - 1
                heapq.heappush(self._ends, (last, self._seated, request))

    def _finish(self, request: int) -> None:
        blocks = self.requests[request].blocks
        for i in range(self._prompt[request] // self._size, self._full[request]):
            self._pool.cache(blocks[i], UNASKED)
        self._pool.give_back(blocks)
        self._rules.finished(request)
        self._seats -= 1

    def _report(self, tick: bool) -> None:
        """What the worker tells at the end of a step."""
        now, n = self._clock.now, len(self.requests)
        ended = self._threads.ended(now)
        for get in ended:
            get.reported_s = now
            for name in self._names[get.request]:
                if self._loading_by.get(name) == get.request:
                    del self._loading_by[name]
        if not ended and not tick and not self._rules.news():
            return
        ready, again, free = self._rules.output([get.request for get in ended], tick)
        for request in ready:
            self._n_loading -= 1
            heapq.heappush(self._ready, (self._place[request], request))
        for request in again:
            self._n_loading -= 1
            at = self.requests[request]
            self._reserved -= self._footprint[request] - len(at.blocks)
            self._pool.give_back(at.blocks)
            at.blocks, at.computed = [], 0
            self.fell_back += 1
            heapq.heappush(self._waiting, request)
        for request in free:
            heapq.heappush(self._waiting, n + request)

    # -- whom it admits ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        if self._cut is not None:
            request, self._cut = self._cut, None
            self._compute(request)
        while self._ready and self._budget > 0 and self._seats < self._max_num_seqs:
            _, request = self._ready[0]
            at = self.requests[request]
            for i in range(at.computed // self._size):
                self._pool.cache(at.blocks[i], self._names[request][i])
            rest = self._footprint[request] - len(at.blocks)
            if rest > self._pool.free:
                return
            heapq.heappop(self._ready)
            self._reserved -= rest
            self._seat(request)
        later: list[int] = []
        while self._waiting and self._budget > 0 and self._seats < self._max_num_seqs:
            key = self._waiting[0]
            request = key % len(self.requests)
            local = self._pool.hit(self._names[request], self._asked[request])
            match = self._rules.match(request, len(local))
            if match is not None and not self._allocate(request, local, match):
                break
            heapq.heappop(self._waiting)
            if match is None and not self._rules.parked(request):
                later.append(key)
        for key in later:
            heapq.heappush(self._waiting, key)

    def _allocate(self, request: int, local: list[int], match: Match) -> bool:
        """Give the request its blocks, and a seat if it has nothing to load; False: there is no room."""
        held = [*local, *match.adopted]
        idle = self._pool.idle(held)
        own = match.external - len(match.adopted)
        rest = self._footprint[request] - len(held)
        if rest + idle > self._pool.free:
            return False
        if match.external and own + idle > self._pool.free - self._reserved:
            return False
        load = range(len(held), len(held) + own)
        at = self.requests[request]
        self._pool.hold(held)
        at.blocks, at.local = held, len(local)
        at.computed = (len(local) + match.external) * self._size
        if match.external:
            at.adopted += len(match.adopted)
            at.blocks += self._pool.take(own)
            self._reserved += rest - own
            self._place[request] = self._holding
            self._holding += 1
            self._n_loading += 1
        self._rules.allocated(request, match, load, at.blocks)
        if own:
            at.loaded += own
            self._to_put.append(Get(request, own, 0.0))
            self.gets.append(self._to_put[-1])
            for i in load:
                name = self._names[request][i]
                at.removable += self._loading_by.setdefault(name, request) != request
        if self._rules.coordinates:
            figures = self._figures
            self._clock.now += (
                figures.coordination_per_lookup.value + match.external * figures.coordination_per_block.value
            )
        if not match.external:
            self._seat(request)
        return True

    def _seat(self, request: int) -> None:
        """It runs from this step on; the rest of its blocks must be there."""
        at = self.requests[request]
        at.blocks += self._pool.take(self._footprint[request] - len(at.blocks))
        if math.isnan(at.admitted):
            at.admitted = self._clock.now
        self._seats += 1
        self._compute(request)

    def _compute(self, request: int) -> None:
        """As much of its prompt as the budget has room for. Its full blocks can be hit from now on, also by
        those that are admitted in this very pass."""
        at, names = self.requests[request], self._names[request]
        tokens = min(self._prompt[request] - at.computed, self._budget)
        self._before += at.computed
        self._pairs += tokens * at.computed + tokens * (tokens + 1) // 2
        first = at.computed // self._size
        at.computed += tokens
        at.computed_tokens += tokens
        self._tokens += tokens
        self._budget -= tokens
        for i in range(first, min(at.computed // self._size, len(names))):
            self._pool.cache(at.blocks[i], names[i])
            self._computed.append(names[i])
        if at.computed == self._prompt[request]:
            self._first_tokens.append(request)
        else:
            self._cut = request
