"""The three pictures of a report."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.ab.results import CDF_POINTS, CellResult
from bench.ab.rounds import BOUND
from bench.ab.servers import STOCK
from bench.ab.statistics import LOSS
from singleflight.stack.demo import replace_file

COLOURS = {
    STOCK: "#b0452f",
    "off": "#c9a227",
    "shadow": "#7a7a7a",
    "attach": "#2f6db0",
    "park": "#3c8d5a",
    BOUND: "#000000",
}
DPI = 72
COLUMNS = 4


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """As a PNG of few colours: reports are committed, so they have to be small."""
    from PIL import Image

    full = io.BytesIO()
    figure.savefig(full, dpi=DPI)
    pyplot().close(figure)
    small = Image.open(full).convert("RGB").quantize(48)
    replace_file(path, lambda scratch: small.save(scratch, optimize=True))


def cdfs(path: Path, cells: Sequence[CellResult]) -> None:
    """TTFT of all requests of all rounds, one panel for each workload."""
    lines = -(-len(cells) // COLUMNS)
    figure, axes = pyplot().subplots(
        lines, COLUMNS, figsize=(13, 2.3 * lines + 0.4), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(cells) :]:
        axis.axis("off")
    shares = np.linspace(0, 1, CDF_POINTS)
    labelled: dict[str, Any] = {}
    for axis, c in zip(axes.flat, cells, strict=False):
        for arm in c.arms:
            style = ":" if arm == BOUND else "-"
            labelled[arm] = axis.plot(c.cdf(arm), shares, style, color=COLOURS.get(arm), lw=1.3)[0]
        axis.set_title(c.cell.name, fontsize=9)
        axis.set_xlim(left=0)
        axis.tick_params(labelsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("TTFT, s", fontsize=8)
    figure.legend(labelled.values(), labelled.keys(), loc="outside upper right", ncols=6, fontsize=8)
    save(figure, path)


def ratios(path: Path, cells: Sequence[CellResult]) -> None:
    """TTFT ratio to stock with its interval, median and p99; the line where a loss begins."""
    from matplotlib import ticker

    arms = [a for a in dict.fromkeys(a for c in cells for a in c.arms) if a not in (STOCK, BOUND)]
    figure, axes = pyplot().subplots(
        1, 2, figsize=(11, 0.34 * len(cells) + 1.4), sharey=True, layout="constrained"
    )
    for axis, measure in zip(axes, ("median_s", "p99_s"), strict=True):
        for shift, arm in enumerate(arms):
            for row, c in enumerate(cells):
                if arm not in c.arms:
                    continue
                r, y = c.ratio(arm, measure), row + 0.16 * (shift - (len(arms) - 1) / 2)
                axis.plot(r.value, y, "o", ms=3.5, color=COLOURS.get(arm), label=arm if row == 0 else None)
                if r.pairs > 1:
                    axis.plot([r.low, r.high], [y, y], "-", lw=1.2, color=COLOURS.get(arm))
        axis.axvline(1, color="black", lw=0.7)
        axis.axvline(LOSS, color="black", lw=0.7, ls=":")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel(f"TTFT {measure.removesuffix('_s')}, ours / stock (left is better)", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(cells)), [c.cell.name for c in cells])
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8, loc="lower left")
    save(figure, path)


def resources(path: Path, cells: Sequence[CellResult]) -> None:
    """What a round took from the store, as a share of what stock took: Gets, bytes."""
    loading = [c for c in cells if c.count(STOCK, "gets")]
    arms = [a for a in dict.fromkeys(a for c in loading for a in c.arms) if a not in (STOCK, BOUND)]
    figure, axes = pyplot().subplots(
        1, 2, figsize=(11, 0.34 * len(loading) + 1.4), sharey=True, layout="constrained", squeeze=False
    )
    for axis, counter in zip(axes[0], ("gets", "get_bytes"), strict=True):
        for shift, arm in enumerate(arms):
            shares = [100 * c.count(arm, counter) / c.count(STOCK, counter) for c in loading]
            rows = [i + 0.8 * (shift + 0.5) / len(arms) - 0.4 for i in range(len(loading))]
            axis.barh(rows, shares, 0.8 / len(arms), color=COLOURS.get(arm), label=arm)
        axis.axvline(100, color="black", lw=0.7)
        axis.set_xlabel(f"{'Gets' if counter == 'gets' else 'bytes'}, % of stock's", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0][0].set_yticks(range(len(loading)), [c.cell.name for c in loading])
    axes[0][0].invert_yaxis()
    if arms:
        axes[0][1].legend(fontsize=8)
    save(figure, path)
