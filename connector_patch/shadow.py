"""Shadow mode: watch the stock connector's loads and count what would have been coalesced.

The rules are the simulator's (docs/simulator.md), so that its "removable" and this one can be compared. The
first load of a block opens a cohort; a load of the same block that is allocated before the cohort closes
joins it; the cohort closes when the load that opened it is reported, and its fan-in less one could have
been spared. Only blocks that are really loaded from the store count.

Nothing here answers vLLM: the connector calls the stock code first and shows us what came of it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from singleflight.core.choice import Chosen

from .choice import Chooser, Heard

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .store import Store

GIVEN_UP_S: Final = 600.0
"""A load that has not been reported for so long never will be: its receive thread is dead, or vLLM has thrown
it away. No healthy one takes so long: at 40 MB/s, it would be 24 GB."""
REMEMBERED_WINDOWS: Final = 8192
"""Latest load windows kept for the recorder's header: enough for a p99, 64 kB."""


@dataclass(slots=True)
class ShadowStats:
    """Plain counts; the unit is one load of one block unless the name says otherwise.

    attempts = cohorts + removable + lost + those of cohorts still open.
    """

    loads: int = 0
    """Requests that loaded something."""
    failed_loads: int = 0
    unregistered_loads: int = 0
    """Loads left out because the bound on open cohorts was reached."""
    attempts: int = 0
    cohorts: int = 0
    """Cohorts (one a block) whose load has landed."""
    dup_cohorts: int = 0
    """Those of fan-in over one."""
    dup_attempts: int = 0
    """Members of those, leaders included."""
    removable: int = 0
    lost: int = 0
    """Members of cohorts whose load failed or was never reported, or that a reset ended: they would not have
    been spared."""
    fan_in: Counter[int] = field(default_factory=Counter)
    """Fan-in of each landed cohort -> cohorts."""
    chose_load: int = 0
    """Requests that loaded, and would have where load or compute is a choice;"""
    chose_compute: int = 0
    """that would have computed instead."""


@dataclass(slots=True)
class _Load:
    """One request's load that is in the air."""

    started: float
    block_ids: set[int]
    leads: list[bytes]
    """Hashes whose cohorts it opened."""
    failed: bool = False


class Shadow(Heard):
    """One per engine; called by the scheduler's thread only.

    Args:
        store: only read.
        max_blocks: bound on open cohorts.
        clock: monotonic seconds.
        chooser: what requests would do where load or compute is a choice; nobody does it.
    """

    def __init__(
        self,
        store: Store,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
        chooser: Chooser | None = None,
    ) -> None:
        self.stats = ShadowStats()
        self.windows_s: deque[float] = deque(maxlen=REMEMBERED_WINDOWS)
        """Seconds from the pass that allocated a load to its report, of loads that opened a cohort: for so
        long a block is on its way. A load that only joined waits behind others of the same block, which
        says nothing about that."""
        self.windows_seen = 0
        self.changed = False
        """Something has been counted since the metrics were last taken."""
        self._windows_taken = 0
        self.chooser = chooser
        self._store = store
        self._max_blocks = max_blocks
        self._clock = clock
        self._loads: dict[str, _Load] = {}
        self._fan_in: dict[bytes, int] = {}

    def asked(self, request: Request, num_local_tokens: int, answer: tuple[int | None, bool]) -> None:
        """The stock connector has answered. Only where there is a `chooser`."""
        assert self.chooser is not None
        tokens, is_async = answer
        if tokens and is_async:
            self.chooser.choose(request, num_local_tokens, tokens, self._clock())
        elif tokens == 0:
            self.chooser.computes_anyway(request, num_local_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks) -> None:
        """vLLM has allocated, and the stock connector has been told: is there a load, and of what?"""
        load = self._store.planned(request.request_id)
        if load is None:
            return
        hashes = request.block_hashes[load.start : load.stop]
        now = self._clock()
        if request.request_id in self._loads:  # preempted: vLLM has thrown the load before this one away
            self._give_up(request.request_id)
        while self._loads and now - self._loads[oldest := next(iter(self._loads))].started >= GIVEN_UP_S:
            self._give_up(oldest)
        self.changed = True
        self.stats.loads += 1
        if self.chooser is not None:
            self.chooser.queued(request.request_id, len(load), now)
            chosen = self.chooser.allocated(request.request_id, 1)
            self.stats.chose_load += chosen is Chosen.LOAD
            self.stats.chose_compute += chosen is Chosen.COMPUTE
        if len(self._fan_in) + len(hashes) > self._max_blocks:
            self.stats.unregistered_loads += 1
            return
        self.stats.attempts += len(hashes)
        leads = []
        for block in hashes:
            if block in self._fan_in:
                self._fan_in[block] += 1
            else:
                self._fan_in[block] = 1
                leads.append(bytes(block))
        ids = {block for group in blocks.get_block_ids() for block in group[load.start : load.stop]}
        self._loads[request.request_id] = _Load(now, ids, leads)

    def output(self, out: KVConnectorOutput) -> None:
        """What the workers report. An aborted request's load runs on, and is reported like any other."""
        if self.chooser is not None:
            ended = out.finished_recving or ()
            failed = bool(out.failed_recving or out.invalid_block_ids)
            self.chooser.reported(ended, self._clock(), failed=failed)
        if not self._loads:
            return
        # A failure may be reported steps before the end of the same load.
        for request_id in out.failed_recving:
            if request_id in self._loads:
                self._loads[request_id].failed = True
        if out.invalid_block_ids:
            for load in self._loads.values():
                load.failed = load.failed or not load.block_ids.isdisjoint(out.invalid_block_ids)
        for request_id in out.finished_recving or ():
            if request_id in self._loads:
                self._close(self._loads.pop(request_id))

    def finished(self, request_id: str) -> None:
        """vLLM has finished or aborted the request. Only where there is a `chooser`."""
        assert self.chooser is not None
        self.chooser.finished(request_id)

    def reset(self) -> None:
        """The caches are being reset: nobody could be served from what is in the air."""
        self.changed = True
        self._loads.clear()
        self.stats.lost += sum(self._fan_in.values())
        self._fan_in.clear()

    def take_windows(self) -> list[float]:
        """The windows seen since the last call, seconds, newest first."""
        self.changed = False
        fresh = self.windows_seen - self._windows_taken
        self._windows_taken = self.windows_seen
        return list(islice(reversed(self.windows_s), fresh))

    def _give_up(self, request_id: str) -> None:
        load = self._loads.pop(request_id)
        load.failed = True
        self._close(load)

    def _close(self, load: _Load) -> None:
        self.changed = True
        stats = self.stats
        members = [self._fan_in.pop(block) for block in load.leads]
        if load.failed:
            stats.failed_loads += 1
            stats.lost += sum(members)
            return
        if members:
            self.windows_s.append(self._clock() - load.started)
            self.windows_seen += 1
        stats.cohorts += len(members)
        stats.removable += sum(members) - len(members)
        stats.fan_in.update(members)
        shared = [fan_in for fan_in in members if fan_in > 1]
        stats.dup_cohorts += len(shared)
        stats.dup_attempts += sum(shared)
