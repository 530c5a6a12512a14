"""`python -m bench.ab`: every arm against stock, over HTTP, on a real stack and a real slow link."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.ab import limited, report, results, servers, workloads
from bench.ab.link import LinkError, shaped_link
from bench.ab.rounds import Bench, SetLink
from bench.ab.workloads import Cell
from singleflight.embedded import EmbeddedError, Stack
from singleflight.tiny_model import ModelError

console = Console(stderr=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
SEGMENT_MB = 2048
YOUNG_S = 20.0
"""A cell gets more pairs than it must have while it has taken less than this."""


@contextlib.contextmanager
def _stack(real_link: bool) -> Iterator[tuple[Stack, SetLink, str, bool]]:
    """The stack, what sets its link, a sentence about the link, and whether the limiter stands in for it."""
    with contextlib.ExitStack() as held:
        link, reason = None, "asked for by --no-link"
        if real_link:
            try:
                link = held.enter_context(shaped_link())
            except LinkError as error:
                reason = str(error)
        if link is None:
            stack = held.enter_context(Stack(segment_mb=SEGMENT_MB))
            says = f"No real link ({reason}): an in-process limiter before every Get, in all arms alike."
        else:
            ends = {"host": link.near, "node_host": link.far, "node_enter": link.enter}
            stack = held.enter_context(Stack(segment_mb=SEGMENT_MB, **ends))
            says = (
                "Link: the store node in a network namespace of its own, a veth pair, `tc tbf` on both ends;"
                " latency, where a workload has any, is added in the process."
            )
        limit_file = stack.folder / "limit.json"

        def set_link(gbit_s: float | None, latency_s: float) -> None:
            if link is not None:
                link.shape(gbit_s)
            limited.write(limit_file, None if link else gbit_s, latency_s)

        set_link(None, 0.0)
        yield stack, set_link, says, link is None


def _measure(
    cells: list[Cell], arms: list[str], run: results.Results, out: Path, pairs: int, most: int,
    minutes: float, real_link: bool,
) -> None:  # fmt: skip
    started = time.monotonic()
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} workloads"), TimeElapsedColumn(), console=console,
    )  # fmt: skip
    with _stack(real_link) as (stack, set_link, says, stand_in), progress:
        run.link = says
        task = progress.add_task("starting", total=len(cells))

        def say(text: str) -> None:
            progress.update(task, description=text)

        filled: set[str] = set()
        for setup, group in itertools.groupby(cells, key=lambda cell: cell.setup):
            waiting = list(group)
            if time.monotonic() - started < minutes * 60:
                say(f"starting {len(arms)} servers")
                actual = replace(setup, limited=setup.limited or stand_in)
                with servers.serving(stack, arms, actual, stack.folder / "limit.json") as running:
                    bench = Bench(running, set_link, stack.folder, filled, say)
                    while waiting and time.monotonic() - started < minutes * 60:
                        cell = waiting.pop(0)
                        measured = results.CellResult(cell, bench.measure(cell, pairs, most, YOUNG_S))
                        run.cells.append(measured)
                        console.print(measured.line(), highlight=False, markup=False)
                        progress.advance(task)
                        run.minutes = (time.monotonic() - started) / 60
                        run.write(out / "results.json")
            for cell in waiting:
                run.left_out[cell.name] = f"the {minutes:g} minutes of --minutes were over"
    run.finished = True


@app.command()
def main(
    arms: Annotated[str, typer.Option(help="Arms, separated by commas; default: all there are.")] = "",
    only: Annotated[str, typer.Option(help="Only workloads whose name contains this.")] = "",
    quick: Annotated[bool, typer.Option(help="The short run: fewer workloads.")] = False,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds of every arm, at least.")] = 5,
    most: Annotated[int, typer.Option(min=1, help="And at most, where rounds are short.")] = 12,
    minutes: Annotated[float, typer.Option(min=0.1, help="No workload is begun after this.")] = 36.0,
    link: Annotated[bool, typer.Option(help="A real shaped link (root), or the in-process limiter.")] = True,
    traces: Annotated[
        Path, typer.Option(help="Where conversation_trace.jsonl and synthetic_trace.jsonl are.")
    ] = (servers.REPOSITORY / ".." / "shared" / "traces"),
    out: Annotated[
        Path | None, typer.Option(help="Folder; default: bench/results/<date>-<host class>.")
    ] = None,
) -> None:
    """Measure TTFT of every arm against stock, and write JSON, pictures and a report."""
    accepted = servers.names()
    chosen = arms.split(",") if arms else accepted
    for arm in chosen:
        if arm not in accepted:
            raise typer.BadParameter(
                f"{arm!r} is no arm; accepted are {', '.join(accepted)}", param_hint="--arms"
            )
    chosen = [servers.STOCK, *(arm for arm in dict.fromkeys(chosen) if arm != servers.STOCK)]
    cells, left_out = workloads.matrix(traces)
    try:
        cells = workloads.choose(cells, only, quick)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    environment = results.environment()
    today = datetime.date.today().isoformat()
    part = "-part" if only else "-quick" if quick else ""
    name = f"{today}-{results.host_class(environment)}{part}"
    folder = out or servers.REPOSITORY / "bench" / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m bench.ab", *sys.argv[1:]])
    run = results.Results(command, "", today, environment, left_out={} if quick or only else left_out)
    code = 1
    try:
        _measure(cells, chosen, run, folder, pairs, max(pairs, most), minutes, link)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except (EmbeddedError, ModelError, RuntimeError, TimeoutError) as error:
        console.print(f"error: {error}", style="red", markup=False)
    finally:
        report.write(run, folder)
    for sentence in results.words(run):
        typer.echo(sentence)
    if run.cells:
        where = os.path.relpath(folder / "report.html")
        typer.echo(f"{len(run.cells)} workloads in {run.minutes:.1f} minutes; report: {where}")
    else:
        typer.echo("Nothing was measured.")
    sys.stdout.flush()
    # Without the interpreter's own end, at which a library that vLLM imports prints pages about leaks.
    os._exit(code)


if __name__ == "__main__":
    # SIGTERM ends a run like Ctrl-C: the link and the servers are taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"})
    app()
