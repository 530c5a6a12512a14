"""Mean TTFT of every workload and arm beside the bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.ab import plots
from bench.ab.servers import STOCK

COLOURS = {**plots.COLOURS, "compute": "#3c8d5a"}


def draw(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    """Seconds on the left, with what each round was; ratios to stock on the right, with their intervals."""
    workloads = [workload for document in documents for workload in document["workloads"]]
    figure, (times, ratios) = plots.pyplot().subplots(
        1, 2, figsize=(12, 0.45 * len(workloads) + 1.5), sharey=True, layout="constrained"
    )
    labelled: dict[str, Any] = {}
    for row, workload in enumerate(workloads):
        arms = workload["arms"]
        for number, (arm, found) in enumerate(arms.items()):
            y = row + 0.7 * ((number + 0.5) / len(arms) - 0.5)
            colour = COLOURS.get(arm)
            bar = times.barh(y, found["medians"]["mean_s"], 0.7 / len(arms), color=colour)
            labelled.setdefault(arm, bar)
            values = found["rounds"]["mean_s"]
            times.plot(values, [y] * len(values), "|", color="black", ms=4, mew=0.6)
            if arm == STOCK:
                continue
            ratio = found["to_stock"]["mean_s"]
            ratios.plot(ratio["value"], y, "o", ms=4, color=colour)
            if ratio["low"] is not None and ratio["high"] is not None:
                ratios.plot([ratio["low"], ratio["high"]], [y, y], "-", lw=1.4, color=colour)
        if "bound_s" in workload:
            (line,) = times.plot([workload["bound_s"]] * 2, [row - 0.42, row + 0.42], color="black", lw=1.6)
            labelled.setdefault("bound: link and core at once", line)
    ratios.axvline(1, color="black", lw=0.7)
    times.set_xlabel("mean TTFT, s (strokes: rounds)", fontsize=8)
    ratios.set_xlabel("ours / stock, with 95 % intervals (left is better)", fontsize=8)
    times.set_yticks(range(len(workloads)), [workload["name"] for workload in workloads], fontsize=8)
    times.invert_yaxis()
    figure.legend(labelled.values(), labelled.keys(), loc="outside upper center", ncols=5, fontsize=8)
    plots.save(figure, path)
