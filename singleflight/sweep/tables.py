"""The tables of a sweep, as CSV and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from singleflight.sim.config import PHASES, Config
from singleflight.sim.counts import Counts, Outcome

AXES = ("w_eff_ms", "instances", "capacity", "routing", "lookup")

TABLES: dict[str, tuple[str, ...]] = {
    "phase_rows": (*AXES, "phase", *Counts._fields),
    "instance_rows": (*AXES, "instance", "phase", *Counts._fields),
    "fanin_hist": (*AXES, "phase", "fanin", "cohorts"),
}
"""Table -> its columns. A row a configuration and phase; likewise an instance; likewise a fan-in that
occurs."""


def rows(table: str, outcomes: Sequence[Outcome]) -> Iterator[tuple[Any, ...]]:
    """The rows of a table, in the order of the outcomes, warmup before steady."""
    for outcome in outcomes:
        axes = _axes(outcome.config)
        if table == "phase_rows":
            for phase in PHASES:
                yield (*axes, phase, *outcome.phase(phase))
        elif table == "instance_rows":
            for i, each in enumerate(outcome.instances):
                for phase in PHASES:
                    yield (*axes, i, phase, *each[phase])
        else:
            for phase in PHASES:
                for fanin, cohorts in sorted(outcome.fanin[phase].items()):
                    yield (*axes, phase, fanin, cohorts)


def write(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Write every table to `folder`, which exists, as ``<table>.csv`` and ``<table>.parquet``.

    Returns:
        Table -> number of rows.

    Raises:
        OSError: a file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sizes = {}
    for table, columns in TABLES.items():
        content = list(rows(table, outcomes))
        with open(folder / f"{table}.csv", "w", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(content)
        arrays = dict(zip(columns, zip(*content, strict=True), strict=True))
        pq.write_table(pa.table(arrays), folder / f"{table}.parquet", compression="zstd")
        sizes[table] = len(content)
    return sizes


def _axes(config: Config) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in AXES)
