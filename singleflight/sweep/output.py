"""The result folder of a sweep: built aside, moved into place at the end, the manifest last."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import joblib

import singleflight
from singleflight.files import strict
from singleflight.sim.columns import Columns
from singleflight.sim.counts import Outcome
from singleflight.sim.gaps import reuse_gaps
from singleflight.sweep.grid import Grid, code_version
from singleflight.sweep.parts import file_digest
from singleflight.sweep.run import ReconcileError, Swept
from singleflight.sweep.summary import Summary

MANIFEST = "manifest.json"
PARTS = ".parts"
WRITING = ".writing-"
_VERSIONS = ("numpy", "numba", "pyarrow", "joblib", "matplotlib", "typer", "rich")


def write_trace(
    folder: str, name: str, outcomes: list[Outcome], columns: Columns, windows: list[int]
) -> dict[str, int]:
    """Tables and plots of one trace; runs in a worker, one trace each.

    Returns:
        Table -> rows.
    """
    from singleflight.sweep import plots, summary, tables

    path = Path(folder)
    path.mkdir()
    sizes = tables.write(path, outcomes)
    plots.redundancy(path / "redundancy.png", {name: summary.summarise(outcomes)})
    plots.fanin(path / "fanin.png", name, outcomes)
    plots.reuse_gaps(path / "reuse_gaps.png", name, reuse_gaps(columns), columns.n_lookups, windows)
    return sizes


def write_overview(path: str, summaries: dict[str, Summary]) -> dict[str, int]:
    """The plot of all traces together."""
    from singleflight.sweep import plots

    plots.redundancy(Path(path), summaries)
    return {}


def publish(
    out: Path,
    traces: dict[str, tuple[Columns, Swept]],
    summaries: dict[str, Summary],
    grid: Grid,
    about: dict[str, Any],
    summary_json: dict[str, Any],
    run: Callable[[Iterable[Any]], Iterator[Any]],
) -> list[str]:
    """Write everything to `out`, which exists. Files of an earlier sweep there that this one does not make
    are removed.

    Args:
        traces: name -> (the trace, its results).
        about: what the manifest says of inputs and command.
        run: runs joblib calls on this machine.

    Returns:
        The files, relative to `out`, in the manifest's order.

    Raises:
        OSError: something cannot be written; `out` is then as it was.
        ReconcileError: a cohort file has not as many rows as there are cohorts.
    """
    with tempfile.TemporaryDirectory(prefix=WRITING, dir=out, ignore_cleanup_errors=True) as temporary:
        staging = Path(temporary)
        calls = [
            joblib.delayed(write_trace)(
                str(staging / name), name, swept.outcomes, columns, list(grid.windows)
            )
            for name, (columns, swept) in traces.items()
        ]
        calls.append(joblib.delayed(write_overview)(str(staging / "redundancy.png"), summaries))
        for _ in run(calls):
            pass
        (staging / "summary.json").write_text(json.dumps(summary_json, indent=1) + "\n")
        for name, (_, swept) in traces.items():
            _check_cohorts(name, swept)
            for file in swept.cohort_files:
                (staging / name / "cohorts").mkdir(exist_ok=True)
                file.replace(staging / name / "cohorts" / file.name)
        files = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
        manifest = {
            **about,
            "grid": asdict(grid),
            "versions": versions(),
            "code_version": code_version(),
            "outputs": {str(path): file_digest(staging / path) for path in files},
        }
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        _forget_previous(out, {str(path) for path in files})
        for path in (*files, Path(MANIFEST)):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).replace(out / path)
    return [str(path) for path in files]


def tidy(out: Path) -> None:
    """Remove what a sweep that was killed, or its workers, left half-written in `out`."""
    for folder in out.glob(f"{WRITING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def versions() -> dict[str, str]:
    """What the result depends on, and its version."""
    found = {"python": platform.python_version(), "kv-singleflight": singleflight.__version__}
    return found | {name: metadata.version(name) for name in _VERSIONS}


def _check_cohorts(name: str, swept: Swept) -> None:
    if not swept.cohort_files:
        return
    import pyarrow.parquet as pq

    rows = sum(pq.read_metadata(file).num_rows for file in swept.cohort_files)
    cohorts = sum(sum(hist.values()) for outcome in swept.outcomes for hist in outcome.fanin.values())
    if rows != cohorts:
        raise ReconcileError(f"{name}: {rows} cohort rows for {cohorts} cohorts")


def _forget_previous(out: Path, new: set[str]) -> None:
    """Remove what an earlier manifest lists, is still as it says, and would now stand beside results it is
    not part of."""
    try:
        listed = strict.document_in(out / MANIFEST)["outputs"]
    except (strict.Refused, KeyError):
        return
    if not isinstance(listed, dict) or not all(map(_is_name, listed)):
        return
    (out / MANIFEST).unlink()  # from here on it does not describe the folder
    for name, digest in listed.items():
        path = out / name
        # Not pathlib's own, which fail on link loops and on names that are too long.
        if name in new or not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(out)):
            continue
        if os.path.isfile(path) and file_digest(path) == digest:
            path.unlink()
            if path.parent != out and not any(path.parent.iterdir()):
                shutil.rmtree(path.parent)


def _is_name(name: str) -> bool:
    """Whether a file can have this name."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False
