"""Park mode: whoever would load what another is loading is asked again later.

Only what the connector API offers: a follower's lookup is answered (None, False), "ask again", until the
leader's load is complete. Then vLLM has made the leader's blocks ordinary prefix-cache hits, and the follower
goes the stock way. While it waits it holds no block, and costs a dict lookup a scheduler step.

What differs from attach mode: its own suffix starts only after the wait; a leader that is aborted takes its
load with it, since nobody else can publish it; whatever vLLM caches after a reset is vLLM's business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from singleflight.core.stats import Outcome
from singleflight.core.table import Left

from .choice import Chooser
from .config import Config
from .rules import ASK_AGAIN, NOTHING, Load, Rules, Run
from .windows import Windows, held

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .store import Answer, Store


class ParkScheduler(Rules):
    """The rules, for followers that wait without blocks."""

    loads_rest_after_wait = True

    def __init__(
        self,
        store: Store,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        windows: Windows | None = None,
        chooser: Chooser | None = None,
    ) -> None:
        super().__init__(store, config, clock, windows, chooser)
        self._parked: dict[str, Request] = {}
        self._served: set[str] = set()  # whose wait has ended well, until they are asked again
        # Of those that have waited and have not been allocated anything since: what was loaded may be evicted
        # before the request is admitted, and it waits again, but not anew.
        self._deadlines: dict[str, float] = {}
        self._steps_back: set[str] = set()

    def chosen(self, request_id: str) -> None:
        """No matter: who waits has no blocks, and who loads learns of it when vLLM has allocated."""

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._allocated.add(request.request_id)
        self._deadlines.pop(request.request_id, None)
        load = self._store.allocated(request, blocks, num_external_tokens)
        self._chose(request.request_id, num_external_tokens)
        if load is not None:
            # Nobody adopts anything: of the destination it matters only which windows will be there.
            hashes = request.block_hashes[load.start : load.stop]
            self._lead(request, load, held(blocks, load) if self._windows else hashes, self._clock())

    def output(self, out: KVConnectorOutput) -> None:
        """vLLM caches a landed leader's blocks before it asks anybody in its next pass."""
        if self._nothing_told(out):
            return
        tick = self._take_tick(out)
        self._end_loads(out)
        self._expire(tick)

    def finished(self, request_id: str, aborted: bool = False) -> None:
        """What the request was loading is never cached: nobody waits on.

        That a client has left says nothing against the store; any other end in mid-load is a failed load.
        """
        self._no_load.pop(request_id, None)
        self._parked.pop(request_id, None)
        self._served.discard(request_id)
        self._deadlines.pop(request_id, None)
        self._steps_back.discard(request_id)
        if self.chooser is not None:
            self.chooser.finished(request_id)
        load = self._loads.get(request_id)
        now = self._clock()
        self.table.leave(request_id, now)
        if load is not None:
            load.gone = True  # it runs on; how it ends says something of the store
            if load.generation is not None:
                self._carry_out(self.table.fail(load.generation, now, charged=not aborted))
                load.generation = None

    def _known_answer(self, request: Request, num_local_tokens: int) -> Answer | None:
        request_id = request.request_id
        if request_id in self._steps_back:
            self._steps_back.discard(request_id)
            return ASK_AGAIN
        if self.table.waiting(request_id):
            return ASK_AGAIN
        known = super()._known_answer(request, num_local_tokens)
        if known is None and request_id in self._served:
            self._served.discard(request_id)
            local = num_local_tokens // self._block_size
            if local + self._store.drops_last >= self._asked(request):
                return NOTHING  # it has all that a load could bring; no need to ask the store
        return known

    def _failed(self, load: Load) -> list[Left]:
        """Who starts again in a model with windows lets those pass whose loads are complete, once: vLLM keeps
        its place before them, and has reserved too little for it, since it counts null blocks as held."""
        left = super()._failed(load)
        if self._windows and not load.gone and not load.request.num_computed_tokens:
            self._steps_back.add(load.request.request_id)
        return left

    def _may_join(self, request_id: str, now: float) -> bool:
        return now < self._deadlines.get(request_id, math.inf) and super()._may_join(request_id, now)

    def _pending_run(self, request: Request, first: int, stop: int) -> Run:
        """Only what will be a local hit: it ends where its windows are there."""
        segments = self.table.run(request.block_hashes, first, stop)
        run = Run(segments, first, first + sum(segment.length for segment in segments))
        return run.before(self._windows.standing(run)) if self._windows else run

    def _join(self, request: Request, run: Run, own_tokens: int, now: float) -> Answer:
        request_id = request.request_id
        self._store.withdraw(request_id)  # by the time this wait is over, an old answer
        if request_id not in self._deadlines:
            size = sum(len(flight.hashes) for flight in {segment.flight for segment in run.segments})
            self._deadlines[request_id] = now + self.table.budget_s(size)
        self.table.attach(request_id, run.segments, now, deadline=self._deadlines[request_id])
        if self.chooser is not None:
            self.table.stats.chose_join += 1
        self._parked[request_id] = request
        return ASK_AGAIN

    def _publish(self, load: Load) -> None:
        """vLLM does, when it promotes the leader."""

    def _waiter(self, request_id: str) -> Request:
        return self._parked[request_id]

    def _left(self, request_id: str, outcome: Outcome) -> None:
        """The request is asked again in the next pass, and goes the stock way or waits anew."""
        self._parked.pop(request_id, None)
        if outcome is Outcome.READY:
            self._served.add(request_id)
