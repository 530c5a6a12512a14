"""`singleflight gate` and `report`. Importing this needs typer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from singleflight.cli.calibrate import calibrate
from singleflight.cli.gating import (
    Asked,
    BatchOption,
    BlockBytesOption,
    CalibrationOption,
    CapacityOption,
    InstancesOption,
    ModelOption,
    RoutingOption,
    ScaleOption,
    SeqsOption,
    StoreOption,
    ThreadsOption,
    TracesArgument,
    decided,
    gated,
)
from singleflight.cli.options import (
    BlockOption,
    FormatOption,
    JsonOption,
    SkipOption,
    SortOption,
    StrictOption,
    UnitOption,
    guarded,
    need,
    options_of,
)


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command("gate")(gate)
    app.command("report")(report)
    app.command("calibrate")(calibrate)


@guarded
def gate(
    paths: TracesArgument,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The verdict; a plot goes beside it, as .png.")
    ] = Path("verdict.json"),
    calibrated: CalibrationOption = None,
    instances: InstancesOption = 1,
    capacity: CapacityOption = None,
    routing: RoutingOption = "round_robin",
    scale: ScaleOption = 1.0,
    threads: ThreadsOption = None,
    max_num_seqs: SeqsOption = None,
    max_num_batched_tokens: BatchOption = None,
    store: StoreOption = None,
    block_bytes: BlockBytesOption = None,
    model: ModelOption = None,
    form: FormatOption = "auto",
    unit: UnitOption = None,
    block_size: BlockOption = None,
    skip_bad: SkipOption = 0,
    sort: SortOption = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict TTFT with and without coalescing for a trace on a deployment; write the verdict that `auto`
    obeys."""
    picture = out.with_suffix(".png")
    if picture == out:
        raise typer.BadParameter(f"--out {out}; accepted: another ending, the plot goes to .png")
    asked = Asked(
        calibrated, instances, capacity, routing, scale, threads, max_num_seqs, max_num_batched_tokens,
        store, block_bytes, model,
    )  # fmt: skip
    found, model = gated(paths, asked, options_of(form, unit, block_size, skip_bad, sort, strict))
    from singleflight.gate import report as gate_report
    from singleflight.terminal import console

    verdict = decided(found, model)
    verdict.write(out)
    gate_report.plot(picture, found, verdict)
    if as_json:
        typer.echo(out.read_text(), nl=False)
        return
    gate_report.show(console.out, verdict)
    console.out.print(f"Written: {out}, {picture}", soft_wrap=True, highlight=False)


@guarded
def report(
    paths: TracesArgument,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("report.html"),
    calibrated: CalibrationOption = None,
    instances: InstancesOption = 1,
    capacity: CapacityOption = None,
    routing: RoutingOption = "round_robin",
    scale: ScaleOption = 1.0,
    threads: ThreadsOption = None,
    max_num_seqs: SeqsOption = None,
    max_num_batched_tokens: BatchOption = None,
    store: StoreOption = None,
    block_bytes: BlockBytesOption = None,
    model: ModelOption = None,
    form: FormatOption = "auto",
    unit: UnitOption = None,
    block_size: BlockOption = None,
    skip_bad: SkipOption = 0,
    sort: SortOption = False,
    strict: StrictOption = False,
) -> None:
    """Write one HTML page, complete in itself, for who decides: verdict, plots, and what would flip it."""
    need("jinja2")
    asked = Asked(
        calibrated, instances, capacity, routing, scale, threads, max_num_seqs, max_num_batched_tokens,
        store, block_bytes, model,
    )  # fmt: skip
    found, model = gated(paths, asked, options_of(form, unit, block_size, skip_bad, sort, strict))
    from singleflight.gate import page
    from singleflight.terminal import console

    verdict = decided(found, model)
    page.write(out, found, verdict)
    console.out.print(f"{'yes' if verdict.enable else 'no'}: {verdict.reasons[0]}", highlight=False)
    console.out.print(f"Written: {out}", soft_wrap=True, highlight=False)
