"""Predicted against measured, offline, in seconds.

    python -m bench.gate.compare bench/results/gate/first.json … --traces FOLDER \\
        --out bench/results/gate/comparison.json --docs docs/gate.md --picture docs/img/gate-prediction.png

A workload that needs a trace which is not in the folder is an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.ab.statistics import difference
from bench.gate import predict, table, workloads
from bench.gate.table import MODES, Row
from bench.gate.workloads import Workload
from bench.page import replaced
from singleflight.stack.demo import replace_file


def rows(runs: Sequence[dict[str, Any]], traces: Path) -> list[Row]:
    """One for each workload that was measured in both modes, in the order of the module.

    Figures are from the lone prompts and loads of all runs' engines.
    """
    lone = [each["lone"] for run in runs for each in run["engines"]]
    return [
        row
        for run in runs
        for workload in workloads.PARTS[run["part"]]
        if (row := _row(run, lone, workload, traces)) is not None
    ]


def _row(
    measured: dict[str, Any], lone: Sequence[dict[str, Any]], workload: Workload, traces: Path
) -> Row | None:
    engines = [each for each in measured["engines"] if each["setup"] == asdict(workload.setup)]
    # In the order in which they ran: the n-th of a mode on an engine makes a pair with the n-th of the other.
    by_mode: dict[str, list[dict[str, Any]]] = {
        mode: [
            r
            for each in engines
            for r in each["rounds"]
            if (r["workload"], r["mode"]) == (workload.name, mode)
        ]
        for mode in MODES
    }
    if not all(by_mode.values()):
        return None
    costs = predict.figures(lone, workload.gbit_s, workload.latency_s, workload.setup.threads)
    arrivals = workload.arrivals(traces)
    outcomes = {mode: predict.predicted(workload, arrivals, costs, mode) for mode in MODES}
    means = {mode: [statistics.fmean(r["ttft_s"]) for r in by_mode[mode]] for mode in MODES}

    def counted(mode: str, key: str) -> float:
        return statistics.median(r["counts"][key] for r in by_mode[mode])

    return Row(
        part=measured["part"],
        name=workload.name,
        requests=len(arrivals),
        engines=len(engines),
        measured={mode: statistics.median(means[mode]) for mode in MODES},
        predicted={mode: float(outcomes[mode].ttft_s.mean()) for mode in MODES},
        saved=difference(means["stock"], means["attach"]),
        removable=(counted("stock", "removable"), float(outcomes["stock"].removable_blocks.sum())),
        adopted=(counted("attach", "blocks_adopted"), float(outcomes["attach"].adopted_blocks.sum())),
        gets={mode: (counted(mode, "gets"), float(outcomes[mode].n_gets)) for mode in MODES},
        megabytes={mode: (counted(mode, "bytes") / 1e6, outcomes[mode].bytes / 1e6) for mode in MODES},
        figures={name: quantity.value for name, quantity in costs.as_dict().items()},
        defaults=costs.defaults(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="of `bench.gate.measure`")
    parser.add_argument("--traces", type=Path, required=True, help="folder with the two public traces")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--docs", type=Path, help="Markdown page whose tables are replaced")
    parser.add_argument("--picture", type=Path, help="PNG, predicted against measured")
    args = parser.parse_args()
    found = rows([json.loads(path.read_text()) for path in args.results], args.traces)
    print(table.markdown(found))
    if args.out:
        text = json.dumps([asdict(row) for row in found], indent=1) + "\n"
        replace_file(args.out, lambda scratch: scratch.write_text(text))
    if args.docs:
        page = replaced(args.docs.read_text(), table.BEGIN, table.END, table.markdown(found))
        replace_file(args.docs, lambda scratch: scratch.write_text(page))
    if args.picture:
        from bench.gate.picture import draw

        draw(args.picture, found)


if __name__ == "__main__":
    main()
