"""The simulator's commands: `simulate`, `sweep`, `trace inspect|convert|synth`.

Importing this needs typer alone; each command imports what it uses when it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from singleflight.cli.options import (
    BlockOption,
    FormatOption,
    JsonOption,
    SkipOption,
    SortOption,
    StrictOption,
    TraceArgument,
    UnitOption,
    WarmupOption,
    guarded,
    need,
    numbers,
    open_trace,
    options_of,
    print_few_steady,
    print_notices,
    share,
    words,
)
from singleflight.cli.trace import trace


def register(app: typer.Typer) -> None:
    """Add the simulator's commands to an application."""
    app.command("simulate")(simulate)
    app.command("sweep")(sweep)
    app.add_typer(trace, name="trace")


@guarded
def simulate(
    path: TraceArgument,
    window_ms: Annotated[int, typer.Option(help="W: how long a load takes, ms of trace time.")],
    instances: Annotated[int, typer.Option(help="N: serving instances.")] = 1,
    capacity: Annotated[int, typer.Option(help="C: blocks an instance caches.")] = 100_000,
    routing: Annotated[str, typer.Option(help="round_robin or affinity.")] = "round_robin",
    lookup: Annotated[
        str, typer.Option(help="contiguous_prefix or independent_blocks.")
    ] = "contiguous_prefix",
    warmup: WarmupOption = "1/10",
    form: FormatOption = "auto",
    unit: UnitOption = None,
    block_size: BlockOption = None,
    skip_bad: SkipOption = 0,
    sort: SortOption = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate one configuration on one trace."""
    from singleflight.sim.config import Config

    try:
        one_routing: Any = routing.replace("-", "_")
        one_lookup: Any = lookup.replace("-", "_")
        config = Config(window_ms, instances, capacity, one_routing, one_lookup, share(warmup))
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from None
    from singleflight.sim.columns import Columns

    reader = open_trace(path, options_of(form, unit, block_size, skip_bad, sort, strict))
    columns = Columns.from_requests(reader)
    print_notices(reader)
    print_few_steady(path, columns, config.warmup)
    from singleflight.sim import kernel

    outcome = kernel.simulate(columns, config)
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
        return
    from rich.console import Console

    from singleflight.sweep import report

    console = Console()
    console.print(report.outcome_table(outcome))
    console.print(f"Imbalance (max / mean steady requests an instance): {report.ratio(outcome.imbalance)}")


@guarded
def sweep(
    paths: Annotated[
        list[str], typer.Argument(metavar="TRACE…", help="Trace files, .gz and .zst too, or -.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the results go; made if need be.")],
    window_ms: Annotated[
        str, typer.Option(help="W axis, ms, separated by commas.")
    ] = "10,30,100,300,1000,3000,10000",
    instances: Annotated[str, typer.Option(help="N axis.")] = "1,2,4,8,16",
    capacity: Annotated[str, typer.Option(help="C axis, blocks.")] = "1000,10000,100000",
    routing: Annotated[str, typer.Option(help="Routing axis.")] = "round_robin,affinity",
    lookup: Annotated[str, typer.Option(help="Lookup axis.")] = "contiguous_prefix,independent_blocks",
    warmup: WarmupOption = "1/10",
    cohorts: Annotated[
        bool, typer.Option("--cohorts", help="Also one row a cohort, as zstd Parquet.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes; -1: one a core.")] = -1,
    backend: Annotated[str, typer.Option(help="loky (this machine), dask or ray.")] = "loky",
    address: Annotated[
        str | None, typer.Option(help="The dask scheduler's or ray cluster's address.")
    ] = None,
    form: FormatOption = "auto",
    unit: UnitOption = None,
    block_size: BlockOption = None,
    skip_bad: SkipOption = 0,
    sort: SortOption = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a grid of configurations over traces; write tables, plots and a manifest.

    The published grid, 420 configurations a trace, unless axes are given.
    An interrupted sweep goes on where it stopped when the same command is given again.
    """
    from singleflight.sweep.grid import Grid

    if jobs == 0 or jobs < -1:
        raise typer.BadParameter(f"--jobs {jobs}; accepted: -1, or 1 and more")
    try:
        routings: Any = words(routing)
        lookups: Any = words(lookup)
        grid = Grid(
            numbers(window_ms), numbers(instances), numbers(capacity), routings, lookups, share(warmup)
        )
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from None
    readers = [open_trace(path, options_of(form, unit, block_size, skip_bad, sort, strict)) for path in paths]
    names = [reader.name for reader in readers]
    if len(set(names)) != len(names):
        raise typer.BadParameter(
            f"two traces are called {max(names, key=names.count)}; each needs a name of its own"
        )
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out {out}: is a file; accepted: a folder, or a name for one")
    need("numba", "numpy", "pyarrow", "joblib", "matplotlib")
    from singleflight.cli.sweep import run

    code = run(
        readers, out, grid, cohorts=cohorts, jobs=jobs, backend=backend, address=address, as_json=as_json
    )
    if code:
        raise typer.Exit(code)
