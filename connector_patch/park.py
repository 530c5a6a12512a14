"""Park mode: whoever would load what another is loading is asked again later.

Only what the connector API offers: a follower's lookup is answered (None, False), "ask again", until the
leader's load is complete. Then vLLM has made the leader's blocks ordinary prefix-cache hits, and the follower
goes the stock way. While it waits it holds no block, and costs a dict lookup a scheduler step.

What differs from attach mode: its own suffix starts only after the wait; a leader that is aborted takes its
load with it, since nobody else can publish it; whatever vLLM caches after a reset is vLLM's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm import envs

from singleflight.estimate import Forecast
from singleflight.stats import Outcome, Reason
from singleflight.table import Left, PendingBlockTable, Publish

from .config import Config, OnDeadline

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Load:
    """A load in the air, of a request that waits for it."""

    generation: int | None
    """Its flight; None if it was not registered."""
    failed: bool = False
    """As far as is known."""


class ParkScheduler:
    """One per engine; called by the scheduler's thread only. The same calls as `AttachScheduler`."""

    def __init__(
        self,
        stock: MooncakeStoreScheduler,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = PendingBlockTable(config.policy, Forecast(envs.VLLM_MOONCAKE_LOAD_RECV_THREADS))
        self._on_deadline = config.on_deadline
        self._stock = stock
        self._block_size: int = stock._block_size
        self._clock = clock
        self._loads: dict[str, _Load] = {}
        self._no_load: set[str] = set()  # as in attach mode: requests that load nothing any more
        self._served: set[str] = set()  # whose wait has ended well, until they are asked again
        self._allocated: set[str] = set()  # in this pass

    # -- one scheduling pass -----------------------------------------------------------------------------

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """(None, False) while the request waits for another's load; else the stock connector's answer."""
        request_id = request.request_id
        if self.table.waiting(request_id):
            return None, False
        if request_id in self._no_load or request.skip_reading_prefix_cache:
            return 0, False
        if request_id in self._served:
            self._served.discard(request_id)
            if num_local_tokens + self._block_size >= request.num_tokens:
                return 0, False  # it has all that a load could bring; no need to ask the store
        if not len(self.table):
            return self._stock.get_num_new_matched_tokens(request, num_local_tokens)
        return self._join_or_load(request, num_local_tokens, self._clock())

    def _join_or_load(self, request: Request, num_local_tokens: int, now: float) -> tuple[int | None, bool]:
        request_id, size = request.request_id, self._block_size
        self._carry_out(self.table.expire(now))  # or it could join a flight that has just become overdue
        first = num_local_tokens // size
        stop = min(len(request.block_hashes), (request.num_tokens - 1) // size)  # the last token is computed
        segments = self.table.run(request.block_hashes, first, stop)
        if not segments or not self.table.may_join(request_id, now):
            return self._stock.get_num_new_matched_tokens(request, num_local_tokens)
        shared = sum(segment.length for segment in segments)
        end = first + shared
        if end < stop and not segments[-1].known_miss(request.block_hashes[end]):
            # It may have a suffix of its own in the store, which it would load only after the wait.
            answer, is_async = self._stock.get_num_new_matched_tokens(request, num_local_tokens)
            if answer is None:
                return None, False
            alone = answer // size
            own = max(alone - shared, 0)
            if alone >= shared and not self.table.worth_joining(segments, alone, now, then=own):
                return answer, is_async
        elif not self.table.worth_joining(segments, shared, now):
            return self._stock.get_num_new_matched_tokens(request, num_local_tokens)
        self._stock.load_specs.pop(request_id, None)
        self._stock.client.discard(request_id)  # by the time this wait is over, an old answer
        self.table.attach(request_id, segments, now)
        return None, False

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has allocated: from here on the request's load may be waited for."""
        request_id = request.request_id
        self._allocated.add(request_id)
        self._stock.update_state_after_alloc(request, blocks, num_external_tokens)
        spec = self._stock.load_specs.get(request_id)
        if spec is None or not spec.can_load:
            return
        first, end = (n // self._block_size for n in (spec.vllm_cached_tokens, spec.kvpool_cached_tokens))
        hashes = request.block_hashes[first:end]
        asked = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        miss = request.block_hashes[end] if end < asked else None
        # Nobody adopts anything, so there is no destination to remember.
        flight = self.table.lead(request_id, hashes, hashes, self._clock(), miss)
        self._loads[request_id] = _Load(flight.generation if flight is not None else None)

    def still_preempted(self, preempted: set[str]) -> set[str]:
        """As in attach mode: a load that was planned in this very pass must not be thrown away."""
        return preempted - self._allocated

    def acknowledgements(self) -> set[str]:
        """End of the pass: deadlines. Nobody needs the worker to be let go, since nobody holds anything."""
        self._allocated.clear()
        self._carry_out(self.table.expire(self._clock()))
        return set()

    # -- what the worker reports -------------------------------------------------------------------------

    def output(self, out: KVConnectorOutput) -> None:
        """Loads have ended. vLLM caches a landed leader's blocks before it asks anybody in its next pass."""
        for request_id in out.failed_recving:
            if request_id in self._loads:
                self._loads[request_id].failed = True
        for request_id in sorted(out.finished_recving or ()):
            load = self._loads.pop(request_id, None)
            if load is None:
                continue
            if load.failed:
                self._no_load.add(request_id)
            if load.generation is None:
                continue
            if load.failed:
                self._carry_out(self.table.fail(load.generation))
            else:
                effects = self.table.land(load.generation, self._clock())
                self._carry_out(effect for effect in effects if not isinstance(effect, Publish))

    # -- requests and operators --------------------------------------------------------------------------

    def finished(self, request_id: str, aborted: bool = False) -> None:
        """vLLM has finished or aborted the request. What it was loading is never cached: nobody waits on.

        That a client has left says nothing against the store; any other end in mid-load is a failed load.
        """
        self._no_load.discard(request_id)
        self._served.discard(request_id)
        load = self._loads.pop(request_id, None)
        self.table.leave(request_id)
        if load is not None and load.generation is not None:
            self._carry_out(self.table.fail(load.generation, charged=not aborted))

    def reset(self) -> None:
        """The caches are being reset: nobody waits for what is in the air."""
        for request_id in list(self._stock.client.futures):
            self._stock.client.discard(request_id)  # answers from before (lookup_async)
        self._carry_out(self.table.reset())

    # -- inside ------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Left]) -> None:
        """Who has left the table is asked again in the next pass, and goes the stock way or waits anew."""
        for effect in effects:
            request_id = str(effect.request)
            if effect.outcome is Outcome.READY:
                self._served.add(request_id)
            if effect.outcome is not Outcome.FELL_BACK:
                continue
            late = effect.reason is Reason.DEADLINE
            if (
                self._on_deadline is OnDeadline.RECOMPUTE
                if late
                else not self.table.may_join(request_id, self._clock())
            ):
                self._no_load.add(request_id)  # as in attach mode: its own Get would stall, or stampede
