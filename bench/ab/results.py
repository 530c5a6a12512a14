"""What a run has measured, as plain data: `results.json`, and the sentences about it."""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bench.ab.rounds import BOUND, JUDGED, Round, figures
from bench.ab.servers import REPOSITORY, STOCK, compute_cores
from bench.ab.statistics import CONFIDENCE, ENOUGH, LOSS, Ratio, ratio
from bench.ab.workloads import Cell
from singleflight.stack import demo

MEASURES = ("median_s", "p99_s", "max_s")
CDF_POINTS = 21


@dataclass(frozen=True)
class CellResult:
    """One cell. `rounds`: all of them, in the order in which they ran."""

    cell: Cell
    rounds: list[Round]

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(r.arm for r in self.rounds))

    def of(self, arm: str) -> list[Round]:
        return [r for r in self.rounds if r.arm == arm]

    def values(self, arm: str, measure: str) -> list[float]:
        """One value for each round, in pair order."""
        return [figures(r.ttft_s)[measure] for r in self.of(arm)]

    def middle(self, arm: str, measure: str) -> float:
        return statistics.median(self.values(arm, measure))

    def ratio(self, arm: str, measure: str, base: str = STOCK) -> Ratio:
        return ratio(self.values(arm, measure), self.values(base, measure))

    def count(self, arm: str, counter: str) -> float:
        return statistics.median(r.counts[counter] for r in self.of(arm))

    def cdf(self, arm: str) -> list[float]:
        """TTFT at CDF_POINTS equally spaced shares of all requests of all rounds, seconds."""
        pooled = [t for r in self.of(arm) for t in r.ttft_s]
        return [float(q) for q in np.quantile(pooled, np.linspace(0, 1, CDF_POINTS))]

    def line(self) -> str:
        """Median TTFT of every arm in one line, and its ratio to stock."""
        arms = (
            f"{arm} {self.middle(arm, 'median_s'):.3f} s"
            + ("" if arm == STOCK else f" (x {self.ratio(arm, 'median_s').value:.2f})")
            for arm in self.arms
        )
        return f"{self.cell.name}, {len(self.of(STOCK))} pairs: {', '.join(arms)}"

    def as_json(self) -> dict[str, Any]:
        cell = {k: v for k, v in asdict(self.cell).items() if k not in ("load", "alone", "quick")}
        arms = {
            arm: {
                **{m: self.middle(arm, m) for m in MEASURES},
                "rounds": {m: self.values(arm, m) for m in MEASURES},
                "counts": {name: self.count(arm, name) for name in self.of(arm)[0].counts},
                "ttft_quantiles_s": self.cdf(arm),
            }
            for arm in self.arms
        }
        ratios = {arm: {m: asdict(self.ratio(arm, m)) for m in MEASURES} for arm in self.arms if arm != STOCK}
        return {**cell, "requests": len(self.rounds[0].ttft_s), "arms": arms, "ratios_to_stock": ratios}


@dataclass
class Results:
    """A run, complete or not.

    Attributes:
        link: one sentence: what stands between engines and store.
        left_out: what was not measured -> why.
        finished: False while the run is going on, and for ever if it was stopped.
        failed: whether a workload is left out because it failed.
    """

    command: str
    link: str
    started: str
    environment: dict[str, str] = field(default_factory=dict)
    cells: list[CellResult] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    finished: bool = False
    failed: bool = False
    minutes: float = 0.0

    def write(self, path: Path) -> None:
        data = {
            **{k: v for k, v in vars(self).items() if k != "cells"},
            "cells": [c.as_json() for c in self.cells],
            "words": words(self),
        }
        text = json.dumps(rounded(data), separators=(",", ":"))
        # One line for each cell and arm: small, and still a diff that can be read.
        text = re.sub(r'(\{"name":|"\w+":\{"median_s":\d)', r"\n\1", text) + "\n"
        demo.replace_file(path, lambda scratch: scratch.write_text(text))


def rounded(value: Any) -> Any:
    """Floats to four figures; infinite bounds, which JSON has no word for, to null."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < float("inf") else None
    return value


def environment() -> dict[str, str]:
    """The machine and the versions."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return {
        **demo.environment(),
        "kernel": platform.release(),
        "scipy": metadata.version("scipy"),
        "cores that compute": compute_cores(),
        "commit": commit.stdout.strip() or "unknown",
    }


def host_class(environment: dict[str, str]) -> str:
    """What kind of machine, for the name of a folder: `amd-epyc-2-cores`."""
    cpu = re.sub(r"[^a-z0-9]+", "-", environment["cpu"].lower()).strip("-")
    return f"{cpu}-{environment['cores']}-cores"


# -- the sentences ---------------------------------------------------------------------------------------


def _judged(results: Results) -> list[tuple[CellResult, str, str, Ratio]]:
    return [
        (c, arm, m, c.ratio(arm, m))
        for c in results.cells
        for arm in c.arms
        if arm not in (STOCK, BOUND)
        for m in JUDGED
    ]


def _times_lower(r: Ratio) -> str:
    return f"{1 / r.value:.1f} times lower ({1 / r.high:.1f} to {1 / r.low:.1f})"


def _named(judged: Sequence[tuple[CellResult, str, str, Ratio]]) -> str:
    return "; ".join(
        f'{arm} on "{c.cell.name}" ({m.removesuffix("_s")} {r.value:.2f}, {r.low:.2f} to {r.high:.2f})'
        for c, arm, m, r in judged
    )


def words(results: Results) -> list[str]:
    """The figures in sentences: the headline, every loss, what is not settled, what is missing."""
    says = []
    for c in results.cells:
        if c.cell.alone is None or len(c.of(STOCK)) < 2:
            continue
        for arm in c.arms:
            if arm in (STOCK, BOUND, "off", "shadow"):
                continue
            bound = c.ratio(arm, "median_s", BOUND)
            says.append(
                f'"{c.cell.name}" over {c.cell.gbit_s} Gbit/s, {arm}: median TTFT'
                f" {c.middle(STOCK, 'median_s'):.2f} s -> {c.middle(arm, 'median_s'):.2f} s,"
                f" {_times_lower(c.ratio(arm, 'median_s'))}; the last request"
                f" {_times_lower(c.ratio(arm, 'max_s'))}; {bound.value:.2f} ({bound.low:.2f} to"
                f" {bound.high:.2f}) times the lower bound of one transfer and one batched prefill."
            )
    judged = _judged(results)
    if judged and min(r.pairs for _, _, _, r in judged) < ENOUGH:
        says.append(f"Fewer than {ENOUGH} pairs of rounds: too few to say where anything is lost.")
        judged = [j for j in judged if j[3].pairs >= ENOUGH]
    losses = [j for j in judged if j[3].is_loss]
    open_ones = [j for j in judged if j[3].may_be_loss]
    if losses:
        says.append(
            f"Lost to stock, the whole interval above {LOSS}: {_named(losses)}. (Of {len(judged)} comparisons"
            f" of equal things about {len(judged) * (1 - CONFIDENCE) / 2:.0f} would look so by chance.)"
        )
    elif judged:
        says.append(
            f"No loss: in none of {len(judged)} comparisons (median and p99) lies the interval above {LOSS}."
        )
    if open_ones:
        says.append(
            f"Not settled: in {len(open_ones)} of {len(judged)} comparisons the interval reaches beyond"
            f" {LOSS} without lying above it; more pairs would tell. The largest ratios:"
            f" {_named(sorted(open_ones, key=lambda j: -j[3].value)[:5])}."
        )
    odd = [j for j in judged if j[1] == "off" and not j[3].low <= 1 <= j[3].high]
    if odd:
        says.append(f"`off` ought to equal stock; its interval leaves 1 out: {_named(odd)}.")
    elif any(j[1] == "off" for j in judged):
        says.append("`off` equals stock within the interval everywhere.")
    if not results.finished:
        says.append("The run was stopped before its end; what it had measured is here.")
    says += [f"Left out: {what} ({why})." for what, why in results.left_out.items()]
    return says
