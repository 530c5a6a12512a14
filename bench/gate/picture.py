"""Predicted against measured, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.ab.plots import COLOURS, pyplot, save
from bench.gate.table import CLOSE, FAR, MODES, Row

MARKERS = {"first": "o", "second": "^", "third": "s"}


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Left: mean TTFT, each workload in both modes. Right: what attach saves of it, with its interval."""
    figure, (ttft, saved) = pyplot().subplots(
        1, 2, figsize=(13, 0.33 * len(rows) + 2.2), layout="constrained"
    )
    seconds = [value for row in rows for each in (row.measured, row.predicted) for value in each.values()]
    ends = [min(seconds) / 1.5, max(seconds) * 1.5]
    for share, shade in ((FAR, 0.12), (CLOSE, 0.2)):
        low, high = ([(1 + sign * share) * end for end in ends] for sign in (-1, 1))
        ttft.fill_between(ends, low, high, color="grey", alpha=shade, lw=0, label=f"within {share:.0%}")
    ttft.plot(ends, ends, color="black", lw=0.6)
    for part, marker in MARKERS.items():
        for mode in MODES:
            of = [row for row in rows if row.part == part]
            if of:
                ttft.plot(
                    [row.measured[mode] for row in of],
                    [row.predicted[mode] for row in of],
                    marker,
                    color=COLOURS[mode],
                    mfc=None if part == "first" else "none",
                    label=f"{mode}, {part} part",
                )
    ttft.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ttft.set(xlabel="measured mean TTFT, s", ylabel="predicted, s")
    ttft.legend(fontsize=8)
    places = range(len(rows))
    share = [row.saved.median / row.measured["stock"] for row in rows]
    around = [
        [(row.saved.median - row.saved.low) / row.measured["stock"] for row in rows],
        [(row.saved.high - row.saved.median) / row.measured["stock"] for row in rows],
    ]
    saved.errorbar(share, places, xerr=around, fmt="s", ms=4, color="black", label="measured, 95 % interval")
    told = [row.predicted_saved / row.predicted["stock"] for row in rows]
    saved.plot(told, places, "x", color="#b0452f", label="predicted")
    saved.axvline(0, color="grey", lw=0.6)
    saved.set_yticks(places, [f"{row.name} ({row.part})" for row in rows], fontsize=8)
    saved.invert_yaxis()
    saved.set_xlabel("share of stock's mean TTFT that attach saves")
    saved.legend(fontsize=8)
    save(figure, path)
