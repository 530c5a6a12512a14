"""`python -m bench.ab`: every arm against stock, over HTTP, on a real stack and a real slow link."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.ab import lmcache, report, results, servers, workloads
from bench.ab.run import Plan, measure
from singleflight.stack.embedded import EmbeddedError
from singleflight.stack.tiny_model import ModelError

STORES = ("mooncake", "lmcache")
console = Console(stderr=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    arms: Annotated[str, typer.Option(help="Arms, separated by commas; default: all there are.")] = "",
    only: Annotated[str, typer.Option(help="Only workloads whose name contains this.")] = "",
    quick: Annotated[bool, typer.Option(help="The short run: fewer workloads.")] = False,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds of every arm, at least.")] = 5,
    most: Annotated[int, typer.Option(min=1, help="And at most, where rounds are short.")] = 12,
    minutes: Annotated[float, typer.Option(min=0.1, help="No workload is begun after this.")] = 60.0,
    store: Annotated[str, typer.Option(help="mooncake, or lmcache: bursts of 8 and 32.")] = "mooncake",
    link: Annotated[bool, typer.Option(help="A real shaped link (root), or the in-process limiter.")] = True,
    traces: Annotated[
        Path, typer.Option(help="Where conversation_trace.jsonl and synthetic_trace.jsonl are.")
    ] = (servers.REPOSITORY / ".." / "shared" / "traces"),
    out: Annotated[
        Path | None, typer.Option(help="Folder; default: bench/results/<date>-<host class>.")
    ] = None,
) -> None:
    """Measure TTFT of every arm against stock, and write JSON, pictures and a report."""
    if store not in STORES:
        raise typer.BadParameter(
            f"{store!r} is no store; accepted are {', '.join(STORES)}", param_hint="--store"
        )
    accepted = servers.names()
    chosen = arms.split(",") if arms else accepted
    for arm in chosen:
        if arm not in accepted:
            raise typer.BadParameter(
                f"{arm!r} is no arm; accepted are {', '.join(accepted)}", param_hint="--arms"
            )
    chosen = [servers.STOCK, *(arm for arm in dict.fromkeys(chosen) if arm != servers.STOCK)]
    if store == "lmcache" and arms:
        raise typer.BadParameter("with --store lmcache the arms are stock and attach", param_hint="--arms")
    cells, left_out = workloads.matrix(traces)
    try:
        cells = lmcache.cells(only) if store == "lmcache" else workloads.choose(cells, only, quick)
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
    try:
        if store == "lmcache":
            lmcache.measure(lmcache.Plan(pairs, max(pairs, most), minutes, only), run, console)
        else:
            measure(Plan(cells, chosen, pairs, max(pairs, most), minutes, link), run, folder, console)
        code = 1 if run.failed else 0
    except KeyboardInterrupt:
        code = 130
    except (EmbeddedError, ModelError) as error:
        code = 1
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
    (lmcache if store == "lmcache" else report).write(run, folder)
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
