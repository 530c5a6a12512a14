"""The plots of a sweep. matplotlib's object interface only: no display, no global state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from singleflight.sim.counts import Outcome
from singleflight.sweep.report import window_label
from singleflight.sweep.summary import Summary

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's: told apart by colour-blind readers too."""

FLOOR = 1e-4
"""Percent below which the redundancy axis is linear, so that zero has a place on it."""


def _axes(title: str, x: str, y: str) -> tuple[Figure, Any]:
    # Fixed margins: working them out from the labels costs more than all the drawing.
    figure = Figure(figsize=(7.2, 4.2), dpi=110)
    axes = figure.add_axes((0.15, 0.125, 0.83, 0.79))
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _percent(value: float, _position: int = 0) -> str:
    return f"{value:g} %" if value < FLOOR or value >= 0.001 else f"{value:.4f} %"


def redundancy(path: Path, summaries: Mapping[str, Summary]) -> None:
    """Redundancy against window, median and range over the configurations of a window, a line a trace.

    Raises:
        OSError: `path` cannot be written.
    """
    figure, axes = _axes(
        "Cold block loads that single-flight could remove, steady phase",
        "load window W (how long a load takes)",
        "redundancy (removable / cold loads)",
    )
    windows = sorted({row.w_eff_ms for summary in summaries.values() for row in summary.windows})
    for colour, (name, summary) in zip(COLOURS * len(summaries), summaries.items(), strict=False):
        x = [row.w_eff_ms for row in summary.windows]
        low, mid, high = (
            [100 * float(getattr(row, field)) for row in summary.windows]
            for field in ("low", "median", "high")
        )
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(x, mid, color=colour, marker="o", markersize=4, label=f"{name}: median, range shaded")
    rows = next(iter(summaries.values())).windows[0].rows
    axes.set_xscale("log")
    axes.set_xticks(windows, [window_label(window) for window in windows], minor=False)
    axes.minorticks_off()
    axes.set_yscale("symlog", linthresh=FLOOR, linscale=0.6)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_percent)
    axes.legend(
        frameon=False,
        fontsize=9,
        loc="upper left",
        title=f"{rows} configurations a window; log scale, linear below {FLOOR:.4f} %",
        title_fontsize=8,
        alignment="left",
    )
    figure.savefig(path)


def fanin(path: Path, name: str, outcomes: Sequence[Outcome]) -> None:
    """How many share a load: the share of cohorts with at least so many members, a line a window.

    Raises:
        OSError: `path` cannot be written.
    """
    pooled: dict[int, Counter[int]] = {}
    for outcome in outcomes:
        pooled.setdefault(outcome.config.w_eff_ms, Counter()).update(outcome.fanin["steady"])
    figure, axes = _axes(
        f"{name}: how many requests share one load",
        "fan-in k (members of a cohort, leader included)",
        "share of cohorts with fan-in at least k",
    )
    widest = 2
    runs = [(hist, [w for w, _ in run]) for hist, run in groupby(sorted(pooled.items()), key=itemgetter(1))]
    for i, (hist, windows) in enumerate(run for run in runs if run[0]):
        values = np.array(sorted(hist))
        counts = np.array([hist[value] for value in values])
        share = np.cumsum(counts[::-1])[::-1] / counts.sum()
        widest = max(widest, int(values[-1]))
        axes.plot(
            values,
            100 * share,
            color=COLOURS[i % len(COLOURS)],
            marker=".",
            drawstyle="steps-pre",
            linewidth=1.4,
            label="W = " + " to ".join(dict.fromkeys(map(window_label, (windows[0], windows[-1])))),
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_plain_percent)
    if widest > 12:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xticks(range(1, widest + 1))
    axes.legend(
        frameon=False, fontsize=9, title="all configurations of a window,\nsteady phase", title_fontsize=8
    )
    figure.savefig(path)


def _plain_percent(value: float, _position: int = 0) -> str:
    return f"{value:.10f}".rstrip("0").rstrip(".") + " %"


def reuse_gaps(path: Path, name: str, gaps: NDArray[np.int64], lookups: int, windows: Sequence[int]) -> None:
    """The distribution of reuse gaps, with the windows marked.

    Args:
        gaps: ms, see `gaps.reuse_gaps`. lookups: block lookups of the trace. windows: W, ms.

    Raises:
        OSError: `path` cannot be written.
    """
    figure, axes = _axes(
        f"{name}: how soon a block is asked for again",
        "time since the block was last asked for",
        "share of all block lookups, cumulative",
    )
    ordered = np.sort(gaps)
    shortest = max(1, min(windows) // 4)
    longest = max(2 * max(windows), int(ordered[-1]) + 1 if len(ordered) else 1)
    x = np.unique(np.geomspace(shortest, longest, 400).astype(np.int64))
    share = 100 * np.searchsorted(ordered, x) / lookups
    some = share > 0  # a log axis has no zero
    axes.plot(x[some], share[some], color=COLOURS[0], linewidth=1.8)
    for window in windows:
        below = 100 * float(np.searchsorted(ordered, window)) / lookups
        axes.axvline(window, color="#888888", linewidth=0.8, linestyle=":")
        if below:
            axes.plot([window], [below], marker="o", markersize=4, color=COLOURS[1])
            axes.annotate(
                f"{below:.2g} %",
                (window, below),
                xytext=(-3, 5),
                textcoords="offset points",
                fontsize=7.5,
                color="#444444",
                ha="right",
            )
    axes.set_xscale("log")
    ticks = [*windows, *(t for t in (60_000, 600_000, 3_600_000) if 3 * max(windows) < t <= longest)]
    axes.set_xticks(ticks, [window_label(tick) for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_xlim(shortest, longest)
    if some.any():
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_ylim(top=250)
    else:
        axes.text(0.5, 0.5, "no block is asked for twice", transform=axes.transAxes, ha="center")
    axes.yaxis.set_major_formatter(_plain_percent)
    axes.text(
        0.01,
        0.98,
        "dots: reuse within a window W, an upper bound on what any routing or cache could coalesce",
        transform=axes.transAxes,
        va="top",
        fontsize=8,
        color="#444444",
    )
    figure.savefig(path)


def distributions(target: IO[bytes], title: str, x: str, of: Mapping[str, NDArray[np.float64]]) -> None:
    """The share of requests that take at most so long, a line a mode, as PNG.

    Args:
        of: two of label -> (R,) s, above 0. x: what takes so long.

    Raises:
        OSError: `target` cannot be written.
    """
    figure, axes = _axes(title, x, "share of requests that wait at most so long")
    low = min(float(seconds.min()) for seconds in of.values()) / 1.5
    high = max(float(seconds.max()) for seconds in of.values()) * 1.5
    # Each line is thinner than the one below it, so that equal ones are both seen.
    for colour, width, (label, seconds) in zip(COLOURS[:2], (3.6, 1.6), of.items(), strict=True):
        ordered = np.sort(seconds)
        shown = np.unique(np.linspace(0, len(ordered), 2000).astype(np.int64))  # of so many requests
        longest = [low, *ordered[shown[1:] - 1], high]
        share = [*(100 * shown / len(ordered)), 100]
        axes.plot(longest, share, color=colour, drawstyle="steps-post", linewidth=width, label=label)
    axes.set_xscale("log")
    steps = (1,) if high / low > 1000 else (1, 2, 5)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))))
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    axes.set_xticks(ticks, [_seconds(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low, high)
    axes.set_ylim(0, 102)
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.legend(frameon=False, fontsize=9, loc="best")
    figure.savefig(target, format="png")


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.999 * size:
            return f"{value / size:g} {unit}"
    return f"{value / 1e-6:g} us"
