"""The trace model in plain Python: the specification. `kernel` is its fast twin and must agree with it
exactly.

Each step names its rule. The rules are restated in docs/simulator.md; the numbers are theirs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from singleflight.sim.config import PHASES, Config, Phase, steady_from
from singleflight.sim.counts import Outcome, with_fanin
from singleflight.traces.request import Request


@dataclass(slots=True)
class Cohort:
    """One load and everyone who waits for it.

    Attributes:
        completes_ms: when the load ends, fixed when it is opened (R10).
        phase: the leader's, where the cohort is counted (R11).
        fanin: members, the leader included.
    """

    completes_ms: int
    phase: Phase
    fanin: int = 1


class Instance:
    """One serving instance: its own LRU and its own open loads; nothing crosses (R4)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.loading: OrderedDict[int, Cohort] = OrderedDict()  # in the order opened
        self.tally: dict[Phase, Counter[str]] = {phase: Counter() for phase in PHASES}
        self.fanin: dict[Phase, Counter[int]] = {phase: Counter() for phase in PHASES}

    def serve(self, now: int, blocks: Sequence[int], phase: Phase) -> None:
        """Process one request that arrives at `now` (ms)."""
        self.complete_until(now)
        tally = self.tally[phase]
        tally["requests"] += 1
        tally["lookups"] += len(blocks)
        broken = False  # R9: has the contiguous prefix ended?
        for block in blocks:  # R8: block by block from the front
            if block in self.cached and not broken:
                self.cached.move_to_end(block)
                tally["hits"] += 1
                continue
            broken = self.config.lookup == "contiguous_prefix"
            tally["attempts"] += 1
            if block in self.loading:
                tally["removable"] += 1
                self.join(block, now)
            else:
                self.open(block, now, phase)

    def complete_until(self, now: int) -> None:
        """R5, R6: end every load due by `now`, earliest first; W is constant, so in the order opened."""
        while self.loading:
            block = next(iter(self.loading))
            if self.loading[block].completes_ms > now:
                return
            self.complete(block)

    def complete(self, block: int) -> None:
        """R7: close the cohort, then insert or refresh the block, then evict."""
        self.close(self.loading.pop(block))
        self.cached[block] = None
        self.cached.move_to_end(block)
        if len(self.cached) > self.config.capacity:
            self.cached.popitem(last=False)

    def open(self, block: int, now: int, phase: Phase) -> None:
        """R10: the first attempt opens a load; the block is absent until now + W and takes no room (R7)."""
        self.loading[block] = Cohort(now + self.config.w_eff_ms, phase)

    def join(self, block: int, now: int) -> None:
        """R10: a later attempt waits for the load that is open; neither its end nor the LRU changes."""
        self.loading[block].fanin += 1

    def close(self, cohort: Cohort) -> None:
        """Count a cohort in its leader's phase (R11)."""
        self.fanin[cohort.phase][cohort.fanin] += 1


def instance_of(index: int, request: Request, config: Config) -> int:
    """R3: which instance serves the request at `index` of the whole trace."""
    key = index if config.routing == "round_robin" else request.hashes[0]
    return key % config.instances


def simulate(requests: Sequence[Request], config: Config, instance: type[Instance] = Instance) -> Outcome:
    """Run the model.

    Args:
        requests: the whole trace in timestamp order, ties in file order (R1).
        config: W, instances, capacity, routing, lookup, warmup.
        instance: the rules of one instance; tests pass broken ones to see that they are noticed.

    Returns:
        The counts, per instance and phase, and the fan-in histograms.

    Raises:
        ValueError: the trace is empty, not in timestamp order, or has a request without blocks.
    """
    times = [request.timestamp_ms for request in requests]
    if not requests or times != sorted(times) or not all(request.hashes for request in requests):
        raise ValueError(
            "the trace must be non-empty, in timestamp order, every request with at least one block"
        )
    steady_ms = steady_from(times[0], times[-1], config.warmup)
    served = [instance(config) for _ in range(config.instances)]
    for index, request in enumerate(requests):
        phase: Phase = "steady" if request.timestamp_ms >= steady_ms else "warmup"
        served[instance_of(index, request, config)].serve(request.timestamp_ms, request.hashes, phase)
    for each in served:
        for cohort in each.loading.values():
            each.close(cohort)  # R11: open at the end counts as it is
    joint = {phase: sum((each.fanin[phase] for each in served), Counter[int]()) for phase in PHASES}
    rows = tuple({p: with_fanin(each.fanin[p], **each.tally[p]) for p in PHASES} for each in served)
    return Outcome(config, rows, {phase: dict(joint[phase]) for phase in PHASES})
