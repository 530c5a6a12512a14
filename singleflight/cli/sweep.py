"""`singleflight sweep` from options to result folder: reads the traces, runs the grid, reports."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from joblib.externals.loky.process_executor import TerminatedWorkerError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from singleflight.cli.options import print_notices
from singleflight.sim.columns import Columns
from singleflight.sim.gaps import statistics
from singleflight.sweep import output, report
from singleflight.sweep.backend import BACKENDS, BackendError, workers
from singleflight.sweep.grid import Grid
from singleflight.sweep.parts import Parts, trace_key
from singleflight.sweep.run import ReconcileError, Swept, sweep
from singleflight.sweep.summary import summarise
from singleflight.terminal.interrupt import Interrupts, interrupts
from singleflight.traces.reader import TraceReader


def run(
    readers: list[TraceReader],
    out: Path,
    grid: Grid,
    *,
    cohorts: bool,
    jobs: int,
    backend: str,
    address: str | None,
    as_json: bool,
) -> int:
    """Run a sweep.

    Returns:
        The exit code: 0; 1 when the results do not add up or a worker was killed; 2 for an unusable backend;
        130 when interrupted.

    Raises:
        TraceError: a trace cannot be read; nothing was written.
        OSError: `out` cannot be written.
    """
    started = time.monotonic()
    if backend not in BACKENDS:
        raise typer.BadParameter(f"--backend {backend!r}; accepted: {', '.join(BACKENDS)}")
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    parts = Parts(out / output.PARTS, [], cohorts)
    chosen: Any = backend
    with interrupts() as ctrl_c:
        try:
            with workers(chosen, address, jobs) as submit:
                traces = _read(readers, parts)
                out.mkdir(parents=True, exist_ok=True)
                output.tidy(out)
                gaps = {name: statistics(columns, grid.windows) for name, columns in traces.items()}
                swept = _with_progress(list(traces.values()), grid, parts, submit, ctrl_c)
                results = dict(zip(traces, swept, strict=True))
                summaries = {name: summarise(each.outcomes) for name, each in results.items()}
                summary_json = {
                    name: {**summaries[name].as_json(), "gaps": gaps[name].as_json()} for name in traces
                }
                about = {"command": shlex.join(sys.argv), "inputs": {r.name: r.about() for r in readers}}
                files = output.publish(
                    out,
                    {name: (traces[name], results[name]) for name in traces},
                    summaries,
                    grid,
                    about,
                    summary_json,
                    submit if backend == "loky" else _here,
                )
                ctrl_c.done = True
            parts.remove()
        except KeyboardInterrupt:
            return _interrupted(out, parts, made)
        except TerminatedWorkerError:
            output.tidy(out)
            typer.echo(
                f"a worker process was killed (out of memory?); {parts.tidy()} finished parts are in "
                f"{parts.folder}, the same command goes on from there",
                err=True,
            )
            return 1
        except (BackendError, ReconcileError) as fault:
            parts.tidy()
            _remove_empty(made)
            typer.echo(str(fault), err=True)
            return 2 if isinstance(fault, BackendError) else 1
    elapsed = time.monotonic() - started
    if as_json:
        document = {"out": str(out), "seconds": round(elapsed, 3), "traces": summary_json, "files": files}
        typer.echo(json.dumps(document))
        return 0
    console = Console()
    report.print_summary(console, summaries, gaps, grid.windows)
    console.print(_reconciled(results, elapsed), highlight=False)
    typer.echo(f"Results: {out}")
    return 0


def _read(readers: list[TraceReader], parts: Parts) -> dict[str, Columns]:
    traces = {}
    for reader in readers:
        columns = Columns.from_requests(reader)
        parts.keys.append(trace_key(reader.sha256, columns))
        traces[reader.name] = columns
    for reader in readers:  # once it is known that all can be read: an error stands alone
        print_notices(reader)
    return traces


def _with_progress(
    traces: list[Columns], grid: Grid, parts: Parts, submit: Any, ctrl_c: Interrupts
) -> list[Swept]:
    console = Console(stderr=True)
    columns = (TextColumn("configurations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(grid.configs()) * len(traces))

        def progress(done: int, _total: int) -> None:
            bar.update(task, completed=done)
            ctrl_c.check()

        return sweep(traces, grid, parts, submit, progress)


def _here(calls: Iterable[Any]) -> Iterator[Any]:
    """Run joblib calls in this process: a cluster's workers do not have our result folder."""
    for function, args, options in calls:
        yield function(*args, **options)


def _reconciled(results: dict[str, Swept], elapsed: float) -> str:
    outcomes = [outcome for each in results.values() for outcome in each.outcomes]
    instance_rows = 2 * sum(len(outcome.instances) for outcome in outcomes)
    lookups = sum(outcome.phase(p).lookups for outcome in outcomes for p in outcome.fanin)
    return (
        f"Reconciled: {len(outcomes)} configurations, {2 * len(outcomes):,} phase rows, "
        f"{instance_rows:,} instance rows, {lookups:,} block lookups, in {elapsed:.1f} s."
    )


def _interrupted(out: Path, parts: Parts, made: list[Path]) -> int:
    output.tidy(out)
    kept = parts.tidy()
    if kept:
        typer.echo(
            f"interrupted; {kept} finished parts are in {parts.folder}, the same command goes on from there",
            err=True,
        )
    else:
        _remove_empty(made)
        typer.echo("interrupted; nothing was finished yet, nothing was written", err=True)
    return 130


def _remove_empty(made: list[Path]) -> None:
    for folder in made:
        with suppress(OSError):
            folder.rmdir()
