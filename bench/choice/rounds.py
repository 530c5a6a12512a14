"""Rounds of one workload: all arms in turns, each from a cold cache, until there are enough."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.ab import counted
from bench.ab.client import drive, send
from bench.ab.rounds import SETTLE_S, Bench
from bench.ab.servers import STOCK, VARIANTS, Server
from bench.ab.statistics import order, ratio
from bench.ab.workloads import Load
from bench.choice.rates import ALONE, Rates
from bench.choice.workloads import Workload

EQUAL = (0.95, 1.05)
"""Where the interval of a ratio lies within these, the arms are equal."""
EQUAL_PAIRS = 8
"""Fewer do not show that, however they fall."""


@dataclass(frozen=True)
class Round:
    """Attributes:
    ttft_s: of every request, in the order of the rows.
    gaps_s: the times between tokens of the requests that decode.
    counts: what the server's counters moved by; cpu: the same of `connector_patch.lab.cpu`.
    """

    arm: str
    ttft_s: list[float]
    gaps_s: list[float]
    counts: dict[str, float]
    cpu: dict[str, int]

    def figures(self, workload: Workload) -> dict[str, float]:
        """Seconds, and microseconds of CPU time."""
        p50, p99 = np.percentile(self.ttft_s, [50, 99])
        found = {
            "mean_s": statistics.fmean(self.ttft_s),
            "median_s": float(p50),
            "p99_s": float(p99),
            "last_s": max(self.ttft_s),
        }
        for name, members in workload.groups.items():
            found[f"{name}_mean_s"] = statistics.fmean(self.ttft_s[i] for i in members)
        if self.gaps_s:
            found["gap_p99_s"] = float(np.percentile(self.gaps_s, 99))
            found["gap_mean_s"] = statistics.fmean(self.gaps_s)
        return found | cpu_figures(self.cpu, len(self.ttft_s))


def cpu_figures(cpu: dict[str, int], requests: int) -> dict[str, float]:
    """Microseconds: a request's share of all steps in which something happened, one idle step, one lookup."""
    return {
        "cpu_request_us": cpu["busy_ns"] / 1000 / requests,
        "cpu_idle_step_us": cpu["idle_ns"] / 1000 / max(1, cpu["idle_steps"]),
        "cpu_lookup_us": cpu["lookup_ns"] / 1000 / max(1, cpu["lookups"]),
    }


@dataclass
class Measured:
    """One workload's rounds, in the order in which they ran."""

    workload: Workload
    rates: Rates
    rounds: list[Round]

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(each.arm for each in self.rounds))

    def of(self, arm: str) -> list[Round]:
        return [each for each in self.rounds if each.arm == arm]

    def values(self, arm: str) -> dict[str, list[float]]:
        """figure -> one value for each round, in pair order."""
        rounds = [each.figures(self.workload) for each in self.of(arm)]
        return {name: [each[name] for each in rounds] for name in rounds[0]}

    def as_json(self) -> dict[str, Any]:
        """All that tables and pictures are made of."""
        w, rates = self.workload, self.rates
        document: dict[str, Any] = {
            "name": w.name,
            "why": w.why,
            "link": w.link,
            "gbit_s": rates.gbit_s[w.link],
            "equal": w.equal,
            "requests": len(w.load.rows),
        }
        bound = rates.bound_s(w) if w.jobs else None
        if bound is not None:
            document |= {"bound_s": bound, "loads_only_s": rates.loads_only_s(w)}
        stock, arms = self.values(STOCK), {}
        for arm in self.arms:
            values, rounds = self.values(arm), self.of(arm)
            arms[arm] = {
                "pairs": len(rounds),
                "medians": {name: statistics.median(each) for name, each in values.items()},
                "counts": {
                    name: statistics.median(r.counts[name] for r in rounds) for name in rounds[0].counts
                },
                "rounds": {
                    "chose_compute": [r.counts.get("chose_compute", 0.0) for r in rounds],
                    **{name: values[name] for name in ("mean_s", "last_s", "cpu_request_us")},
                },
            }
            if arm != STOCK:
                arms[arm]["to_stock"] = _ratios(values, stock)
            if arm in VARIANTS and "attach" in self.arms:
                arms[arm]["to_attach"] = _ratios(values, self.values("attach"))
            if bound is not None:
                arms[arm]["to_bound"] = asdict(ratio(values["mean_s"], [bound] * len(rounds)))
        return document | {"arms": arms}

    def settled(self) -> bool:
        """Whether every arm's mean TTFT is shown to equal stock's."""
        pairs = len(self.of(STOCK))
        stock = self.values(STOCK)["mean_s"]
        ratios = [ratio(self.values(arm)["mean_s"], stock) for arm in self.arms if arm != STOCK]
        return pairs >= EQUAL_PAIRS and all(EQUAL[0] < r.low and r.high < EQUAL[1] for r in ratios)


def _ratios(ours: dict[str, list[float]], base: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {name: asdict(ratio(ours[name], base[name])) for name in ours if all(base[name])}


def measure(bench: Bench, found: Measured, pairs: int, seconds: float) -> None:
    """So many pairs; where nothing can be gained, more until that is shown or so many seconds are over.

    `found` has all whole pairs at any time.
    """
    workload = found.workload
    _prepare(bench, workload, found.rates)
    started, index = time.monotonic(), 0
    while index < pairs or (workload.equal and time.monotonic() - started < seconds and not found.settled()):
        pair = []
        for arm in order(list(bench.servers), index):
            bench.say(f"{workload.name}: pair {index + 1}, {arm}")
            pair.append(_round(bench.servers[arm], workload, bench))
        found.rounds += pair
        index += 1


def _prepare(bench: Bench, workload: Workload, rates: Rates) -> None:
    """Store its prefixes at full speed; then a round on every server that does not count, over the link that
    it is measured over: the first of its kind is slower, and those that learn shall know this link."""
    bench.set_link(None, 0.0)
    if workload.fill.name not in bench.filled:
        bench.say(f"{workload.name}: storing what it will load")
        drive(bench.servers[STOCK], [*workload.fill.arguments(bench.folder), *ALONE])
        bench.servers[STOCK].cold()
        bench.filled.add(workload.fill.name)
    bench.set_link(rates.gbit_s[workload.link], 0.0)
    for arm, server in bench.servers.items():
        # Stock learns nothing.
        if arm != STOCK or workload.load.name not in bench.used_to or workload.warm:
            bench.say(f"{workload.name}: a first round that does not count, {arm}")
            server.cold()
            drive(server, workload.load.arguments(bench.folder))
    bench.used_to.add(workload.load.name)


def _round(server: Server, workload: Workload, bench: Bench) -> Round:
    if not workload.warm:
        server.cold()
    counters, cpu = server.counters(), counted.read(server.cpu)
    ttft_s, gaps = _sent(server, workload.load, bench)
    time.sleep(SETTLE_S)
    now = server.counters()
    return Round(
        server.arm,
        ttft_s,
        [gap for number in workload.decoding for gap in gaps[number]],
        {name: now[name] - counters[name] for name in now},
        {name: n - cpu[name] for name, n in counted.read(server.cpu).items()},
    )


def _sent(server: Server, load: Load, bench: Bench) -> tuple[Sequence[float], Sequence[Sequence[float]]]:
    # A collection in the client would count as the server's time.
    gc.collect()
    gc.disable()
    try:
        said = send(server, load.arguments(bench.folder))
    finally:
        gc.enable()
    return said["ttfts"], said["itls"]
