"""Measuring one cell: fill the store once, then rounds of all arms, interleaved, each from the same start."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.ab.client import drive
from bench.ab.servers import STOCK, Server
from bench.ab.statistics import order, ratio
from bench.ab.workloads import Cell, Load

JUDGED = ("median_s", "p99_s")
"""The measures by which a workload is won or lost; the maximum of a round is only one request."""
BOUND = "bound"
"""The lower bound measured as if it were an arm; see `_lower_bound`."""
SETTLE_S = 1.1
"""After a round an engine tells its counters with its next step, and spins for a second (vLLM's
SpinCondition); only then the next server is driven."""


@dataclass(frozen=True)
class Round:
    """One load through one arm.

    Attributes:
        ttft_s: each request's time to first token, seconds.
        counts: what the server's counters (`servers.COUNTERS`) moved by.
    """

    arm: str
    ttft_s: list[float]
    counts: dict[str, float] = field(default_factory=dict)


class SetLink(Protocol):
    """Sets the link between engines and store, whichever way it is made here."""

    def __call__(self, gbit_s: float | None, latency_s: float) -> None: ...


@dataclass
class Bench:
    """What one group of servers shares.

    Attributes:
        servers: arm -> server, in the order in which arms run.
        set_link: rate in Gbit/s (None: unshaped) and latency in seconds.
        folder: where traces are written.
        filled: names of loads whose prefixes are in the store.
        say: told what happens now.
        used_to: names of loads that every server has had.
    """

    servers: Mapping[str, Server]
    set_link: SetLink
    folder: Path
    filled: set[str]
    say: Callable[[str], None]
    used_to: set[str] = field(default_factory=set)

    def prepare(self, cell: Cell) -> None:
        """Have the cell's prefixes in the store, and every server used to the load: the first round of its
        kind is slower in any arm. Both at full speed."""
        self.set_link(None, 0.0)
        load = cell.load
        if load.name not in self.filled:
            self.say(f"{cell.name}: storing what it will load")
            filler = self.servers[STOCK]
            drive(filler, [*load.arguments(self.folder), "--max-concurrency", "1"])
            filler.cold()
            self.filled.add(load.name)
        if load.name in self.used_to and not cell.warm:
            return
        self.used_to.add(load.name)
        for arm, server in self.servers.items():
            self.say(f"{cell.name}: a first round that does not count, {arm}")
            server.cold()
            drive(server, load.arguments(self.folder))

    def measure(self, cell: Cell, pairs: int, most: int, seconds: float) -> list[Round]:
        """Rounds: as many pairs as asked for, and up to `most` while the cell is younger than `seconds` or
        while a loss shows: a false one ought to go, a true one to become sure."""
        self.prepare(cell)
        self.set_link(cell.gbit_s, cell.latency_s)
        arms = [*self.servers, *([BOUND] if cell.alone else [])]
        rounds: list[Round] = []
        started, index = time.monotonic(), 0
        while index < pairs or (
            index < most and (time.monotonic() - started < seconds or _shows_loss(rounds, list(self.servers)))
        ):
            for arm in order(arms, index):
                self.say(f"{cell.name}: pair {index + 1}, {arm}")
                rounds.append(self._lower_bound(cell) if arm == BOUND else self._round(cell, arm))
            index += 1
        return rounds

    def _round(self, cell: Cell, arm: str) -> Round:
        server = self.servers[arm]
        if not cell.warm:
            server.cold()
        before = server.counters()
        ttft_s = self._drive(server, cell.load)
        time.sleep(SETTLE_S)
        after = server.counters()
        return Round(arm, ttft_s, {name: after[name] - before[name] for name in after})

    def _lower_bound(self, cell: Cell) -> Round:
        """One transfer plus one batched prefill: no sharing can be faster.

        The transfer is what one request alone pays more when cold than when warm; the prefill is the burst
        with its prefix local. Both through stock.
        """
        assert cell.alone is not None
        server = self.servers[STOCK]
        server.cold()
        cold = self._drive(server, cell.alone)[0]
        warm = self._drive(server, cell.alone)[0]
        return Round(BOUND, [max(0.0, cold - warm) + t for t in self._drive(server, cell.load)])

    def _drive(self, server: Server, load: Load) -> list[float]:
        # A collection in the client would count as the server's time.
        gc.collect()
        gc.disable()
        try:
            return drive(server, load.arguments(self.folder))
        finally:
            gc.enable()


def _shows_loss(rounds: list[Round], arms: list[str]) -> bool:
    values = {
        (arm, measure): [figures(r.ttft_s)[measure] for r in rounds if r.arm == arm]
        for arm in arms
        for measure in JUDGED
    }
    return any(
        ratio(values[arm, measure], values[STOCK, measure]).is_loss
        for arm in arms
        if arm != STOCK
        for measure in JUDGED
    )


def figures(ttft_s: list[float]) -> dict[str, float]:
    """Median, 99th percentile (interpolated) and maximum, seconds."""
    p50, p99 = np.percentile(ttft_s, [50, 99])
    return {"median_s": float(p50), "p99_s": float(p99), "max_s": float(max(ttft_s))}
