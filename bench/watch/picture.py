"""The panels as a picture, drawn from what Prometheus answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.ab.plots import pyplot, save
from bench.watch.dashboard import Panel
from bench.watch.prometheus import Line

COLUMNS = 4
UNITS = {"ops": "/ s", "Bps": "bytes / s", "s": "s", "percentunit": "share", "short": ""}
Answers = Mapping[str, Sequence[tuple[str, Line]]]
"""Panel title -> (series name, its points)."""


def draw(path: Path, panels: Sequence[Panel], answers: Answers, start: float) -> None:
    """Write the picture; seconds since `start` run to the right. The first panel's table is its title."""
    charts = [panel for panel in panels if panel.unit]
    rows = -(-len(charts) // COLUMNS)
    figure, axes = pyplot().subplots(
        rows, COLUMNS, figsize=(15, 2.5 * rows + 0.6), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(charts) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, charts, strict=False):
        axis.set_title(f"{panel.row}: {panel.title}", fontsize=8, loc="left")
        for name, line in answers[panel.title]:
            axis.plot([at - start for at, _ in line.points], [value for _, value in line.points], label=name)
        axis.set_ylabel(UNITS[panel.unit], fontsize=7)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6, loc="upper left")
        axis.grid(alpha=0.3)
    came_to = [name for panel in panels if not panel.unit for name, _ in answers[panel.title]]
    figure.suptitle("; ".join(came_to), fontsize=8)
    save(figure, path)
