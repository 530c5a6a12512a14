"""What a simulated configuration comes out with; the model and the kernel both return it, so `==` compares
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from singleflight.sim.config import PHASES, Config, Phase


class Counts(NamedTuple):
    """Counts of one phase, of one instance or of all of them. All but the last two add up over instances.

    Attributes:
        requests: arrivals.
        lookups: block lookups, hits + attempts (R11).
        hits: blocks found cached (R8, R9).
        attempts: cold loads asked for, by the phase of the request that asks.
        removable: attempts that joined an open load, the ones single-flight saves (R10), likewise.
        cohorts: loads opened, by the phase of the leader (R11).
        dup_cohorts: cohorts with fan-in above 1 (R12).
        dup_attempts: their members, leaders included (R12).
        max_fanin: largest fan-in, 0 without cohorts.
        p99_fanin: nearest rank, the ceil(0.99 x cohorts)-th smallest fan-in (R12), 0 without cohorts.
    """

    requests: int = 0
    lookups: int = 0
    hits: int = 0
    attempts: int = 0
    removable: int = 0
    cohorts: int = 0
    dup_cohorts: int = 0
    dup_attempts: int = 0
    max_fanin: int = 0
    p99_fanin: int = 0

    @property
    def redundancy(self) -> Fraction:
        """removable / attempts, exactly; 0 if there is no attempt (R12)."""
        return Fraction(self.removable, self.attempts) if self.attempts else Fraction(0)


N_ADDITIVE = Counts._fields.index("max_fanin")
"""The counts before this one are sums over instances; the two after it are not."""

Histogram = Mapping[int, int]
"""fan-in -> cohorts with it."""


def nearest_rank(hist: Histogram, percent: int) -> int:
    """The ceil(percent / 100 x n)-th smallest fan-in of `hist`, which holds n cohorts; 0 if n is 0 (R12)."""
    rank = -(-percent * sum(hist.values()) // 100)
    for fanin in sorted(hist):
        rank -= hist[fanin]
        if rank <= 0:
            return fanin
    return 0


def with_fanin(
    hist: Histogram,
    requests: int = 0,
    lookups: int = 0,
    hits: int = 0,
    attempts: int = 0,
    removable: int = 0,
) -> Counts:
    """Complete the counts with what follows from the fan-in histogram alone."""
    return Counts(
        requests,
        lookups,
        hits,
        attempts,
        removable,
        cohorts=sum(hist.values()),
        dup_cohorts=sum(n for fanin, n in hist.items() if fanin > 1),
        dup_attempts=sum(n * fanin for fanin, n in hist.items() if fanin > 1),
        max_fanin=max(hist, default=0),
        p99_fanin=nearest_rank(hist, 99),
    )


def total(rows: Iterable[Counts], hist: Histogram) -> Counts:
    """The row of all instances: sums (R12), with the fan-in figures of the joint histogram."""
    sums = [sum(column) for column in zip(*rows, strict=True)]
    return with_fanin(hist, *sums[:5])


@dataclass(frozen=True)
class Outcome:
    """The result of one configuration on one trace.

    Attributes:
        config: what was simulated.
        instances: per instance, its counts by phase.
        fanin: per phase, the fan-in histogram over all instances.
    """

    config: Config
    instances: tuple[Mapping[Phase, Counts], ...]
    fanin: Mapping[Phase, Histogram]

    def phase(self, phase: Phase) -> Counts:
        """The counts of all instances together."""
        return total((each[phase] for each in self.instances), self.fanin[phase])

    @property
    def imbalance(self) -> Fraction:
        """Largest over mean number of steady requests an instance; 0 if there are none."""
        requests = [each["steady"].requests for each in self.instances]
        return Fraction(max(requests) * len(requests), sum(requests)) if any(requests) else Fraction(0)

    def as_json(self) -> dict[str, Any]:
        """``{"config", "warmup", "steady", "instances"}``, the document `simulate --json` prints."""
        document: dict[str, Any] = {"config": self.config.as_json()}
        for phase in PHASES:
            counts, hist = self.phase(phase), self.fanin[phase]
            led = sum(fanin * n for fanin, n in hist.items())
            document[phase] = {
                **counts._asdict(),
                "p50_fanin": nearest_rank(hist, 50),
                "redundancy": float(counts.redundancy),
                "led_attempts": led,
                "led_removable": led - counts.cohorts,
                "fanin_hist": {str(fanin): hist[fanin] for fanin in sorted(hist)},
            }
        document["steady"]["imbalance"] = float(self.imbalance)
        document["instances"] = [
            {"instance": i, **{phase: each[phase]._asdict() for phase in PHASES}}
            for i, each in enumerate(self.instances)
        ]
        return document
