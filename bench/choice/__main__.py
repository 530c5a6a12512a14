"""`python -m bench.choice [PART ...]`: stock, attach, and attach that may compute, over real shaped links."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.ab import servers
from bench.ab.client import LoadError
from bench.ab.results import Results, environment, host_class
from bench.ab.rounds import Bench
from bench.ab.run import stack_and_link
from bench.ab.servers import STOCK, VARIANTS, Setup
from bench.choice import rates, report, rounds, workloads
from bench.choice.workloads import PARTS, SHARES, WIDE, Workload
from connector_patch import config
from singleflight.stack.embedded import EmbeddedError
from singleflight.stack.tiny_model import ModelError

console = Console(stderr=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FAST_TO_SLOW = (WIDE, *reversed(SHARES))
SEGMENT_MB = 3072
"""The traces' slices take most of it."""
ARMS = (STOCK, "attach", *VARIANTS)


def unknown(arm: str) -> str | None:
    """Why this version has no such arm."""
    try:
        config.parse(VARIANTS.get(arm, {"mode": "attach"}))
    except ValueError as error:
        return str(error)
    return None


@app.command()
def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PARTS)}; default: all.")] = None,
    arms: Annotated[str, typer.Option(help="Arms, separated by commas; default: all there are.")] = "",
    quick: Annotated[bool, typer.Option(help="The short run: one workload of most parts.")] = False,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds of every arm.")] = 5,
    equal_s: Annotated[
        float, typer.Option(min=1, help="Seconds of each workload where nothing can be gained, at most.")
    ] = 120.0,
    minutes: Annotated[float, typer.Option(min=0.1, help="No workload is begun after this.")] = 35.0,
    link: Annotated[bool, typer.Option(help="A real shaped link (root), or the in-process limiter.")] = True,
    traces: Annotated[
        Path, typer.Option(help="Where conversation_trace.jsonl and synthetic_trace.jsonl are.")
    ] = (servers.REPOSITORY / ".." / "shared" / "traces"),
    out: Annotated[
        Path | None, typer.Option(help="Folder; default: bench/results/load_or_compute-<date>-<host class>.")
    ] = None,
) -> None:
    """Measure, and write one JSON file for each part, a table and a picture of all parts in the folder."""
    chosen_parts = list(dict.fromkeys(parts or PARTS))
    for part in chosen_parts:
        if part not in PARTS:
            raise typer.BadParameter(f"{part!r} is no part; accepted are {', '.join(PARTS)}")
    chosen = arms.split(",") if arms else [arm for arm in ARMS if unknown(arm) is None]
    for arm in chosen:
        if arm not in ARMS:
            raise typer.BadParameter(
                f"{arm!r} is no arm; accepted are {', '.join(ARMS)}", param_hint="--arms"
            )
        if (reason := unknown(arm)) is not None:
            raise typer.BadParameter(f"this version has no arm {arm!r}: {reason}", param_hint="--arms")
    chosen = [STOCK, *(arm for arm in dict.fromkeys(chosen) if arm != STOCK)]
    about = environment()
    today = datetime.date.today().isoformat()
    name = f"load_or_compute-{today}-{host_class(about)}{'-quick' if quick else ''}"
    folder = out or servers.REPOSITORY / "bench" / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    todo = [(part, w) for part in chosen_parts for w in workloads.of(part, traces, quick)]
    # Links from fast to slow: a load that takes longer than expected is soon known, while one that is
    # expected to take longer than it would may not happen.
    todo.sort(key=lambda each: FAST_TO_SLOW.index(each[1].link))
    run = report.Run(
        " ".join(["python -m bench.choice", *sys.argv[1:]]).replace(str(traces), "FOLDER"), about
    )
    code = 0
    try:
        measure(todo, chosen, run, pairs, equal_s, minutes, link, folder)
    except KeyboardInterrupt:
        code = 130
    except (EmbeddedError, ModelError, LoadError, OSError) as error:
        code = 1
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
    documents = report.read(folder)
    if documents:
        report.write(folder, documents)
        typer.echo(report.text(documents))
        typer.echo(f"Written: {os.path.relpath(folder)}")
    else:
        typer.echo("Nothing was measured.")
    sys.stdout.flush()
    # Without the interpreter's own end, at which a library that vLLM imports prints pages about leaks.
    os._exit(code)


def measure(
    todo: list[tuple[str, Workload]],
    arms: list[str],
    run: report.Run,
    pairs: int,
    equal_s: float,
    minutes: float,
    real_link: bool,
    folder: Path,
) -> None:
    """All of them, one after the other; what there is, is written after each of them."""
    started = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    said = Results("", "", "")
    with (
        stack_and_link(real_link, said, SEGMENT_MB) as (stack, set_link, stand_in),
        Progress(*columns, console=console) as bar,
    ):
        task = bar.add_task(f"starting {len(arms)} servers", total=len(todo))

        def say(text: str) -> None:
            bar.update(task, description=text)

        run.link = said.link
        with servers.serving(stack, arms, Setup(limited=stand_in, counted=True)) as running:
            bench = Bench(running, set_link, stack.folder, set(), say)
            links = [link for link in SHARES if any(w.link == link for _, w in todo)]
            run.rates = rates.measure(bench, links, say)
            bar.console.print(report.rates_line(run.rates), highlight=False, markup=False)
            for part, workload in todo:
                if time.monotonic() - started > 60 * minutes:
                    run.left_out(part, workload.name, f"the {minutes:g} minutes of --minutes were over")
                    run.write(folder)
                    continue

                found = rounds.Measured(workload, run.rates, [])
                try:
                    rounds.measure(bench, found, pairs, equal_s)
                except (LoadError, TimeoutError) as error:
                    run.left_out(part, workload.name, str(error))
                    bar.console.print(f"{workload.name} left out: {error}", highlight=False, markup=False)
                finally:
                    run.minutes = (time.monotonic() - started) / 60
                    if found.rounds:
                        run.take(part, found)
                        bar.console.print(report.line(found.as_json()), highlight=False, markup=False)
                    run.write(folder)
                bar.advance(task)


if __name__ == "__main__":
    # SIGTERM ends a run like Ctrl-C: the link and the servers are taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"})
    app()
