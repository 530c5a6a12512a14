"""`singleflight gate` and `singleflight calibrate`. Importing this needs typer alone."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from singleflight import calibration, recording
from singleflight.quantity import Origin, Quantity
from singleflight.sim.cost import Figures
from singleflight.sim.options import (
    BlockOption,
    FormatOption,
    JsonOption,
    SkipOption,
    SortOption,
    TraceArgument,
    UnitOption,
    guarded,
    need,
    open_trace,
    options_of,
    print_notices,
    stop,
)

MAX_SCALE = 1e6


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command("gate")(gate)
    app.command("calibrate")(calibrate)


@guarded
def gate(
    path: TraceArgument,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The verdict; a plot goes beside it, as .png.")
    ] = Path("verdict.json"),
    calibrated: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="What `calibrate` wrote; without it, defaults."),
    ] = None,
    instances: Annotated[int, typer.Option(help="N: serving instances.")] = 1,
    capacity: Annotated[int, typer.Option(help="C: blocks an instance caches.")] = 100_000,
    routing: Annotated[str, typer.Option(help="round_robin or affinity.")] = "round_robin",
    scale: Annotated[float, typer.Option(help="Run the trace so many times as fast.")] = 1.0,
    window_ms: Annotated[
        float | None, typer.Option(help="How long a load takes, real ms, instead of the cost model's.")
    ] = None,
    block_bytes: Annotated[
        float | None, typer.Option(help="Bytes of KV cache a block, all layers and ranks.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="As the deployment is told; auto mode compares.")] = None,
    form: FormatOption = "auto",
    unit: UnitOption = None,
    block_size: BlockOption = None,
    skip_bad: SkipOption = 0,
    sort: SortOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decide whether coalescing pays for a trace on a deployment; write the verdict that `auto` obeys."""
    _within("--scale", scale, 1 / MAX_SCALE, MAX_SCALE)
    _within("--window-ms", window_ms, 1e-3, 1e9)
    _within("--block-bytes", block_bytes, 1, 1e15)
    picture = out.with_suffix(".png")
    if picture == out:
        raise typer.BadParameter(f"--out {out}; accepted: another ending, the plot goes to .png")
    try:
        header = recording.header_of(path)
        figures = calibration.read(calibrated).figures if calibrated else Figures()
    except (recording.HeaderError, calibration.CalibrationError) as fault:
        stop(str(fault))
    if header is not None:
        block_size = _agree("--block-size", block_size, header.block_size_tokens, path)
        model = _agree("--model", model, header.model, path)
    reader = open_trace(path, options_of(form, unit, block_size, skip_bad, sort))
    need("numba", "numpy", "matplotlib")
    from singleflight.sim.columns import Columns

    columns = Columns.from_requests(reader)
    print_notices(reader)
    assert reader.block_size is not None
    window = Quantity(window_ms, "ms", Origin.GIVEN) if window_ms is not None else None
    if window is None and header is not None and (header.load_windows_ms or {}).get("p50"):
        window = Quantity((header.load_windows_ms or {})["p50"], "ms", Origin.MEASURED)

    from singleflight import console, gate_report
    from singleflight.gate import Deployment, Gate

    one_routing: Any = routing.replace("-", "_")
    deployment = Deployment(instances, capacity, one_routing, scale, reader.block_size, window)
    try:
        if block_bytes is not None:
            figures = figures.given(kv_bytes_per_token=block_bytes / reader.block_size)
        gated = Gate(columns, deployment, figures, clock_is_fine=header is not None)
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from None
    with console.progress() as bar:
        bar.add_task("simulating the deployment, and what is around it")
        verdict = gate_report.verdict(gated, reader, model, gated.flip_s())
        verdict.write(out)
        gate_report.plot(picture, gated, verdict)
    if as_json:
        typer.echo(out.read_text(), nl=False)
        return
    gate_report.show(console.out, verdict)
    console.out.print(f"Written: {out}, {picture}", soft_wrap=True, highlight=False)


def _within(option: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # refuses NaN too
        raise typer.BadParameter(f"{option} {value:g}; accepted: a number from {low:g} to {high:g}")


def _agree(option: str, asked: Any, recorded: Any, path: str) -> Any:
    if asked not in (None, recorded):
        raise typer.BadParameter(
            f"{option} {asked}; accepted: {recorded}, which {recording.header_path(path)} says"
        )
    return recorded


@guarded
def calibrate(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The calibration, for `gate --calibration`.")
    ] = Path("calibration.json"),
    mooncake_config: Annotated[
        Path | None,
        typer.Option(metavar="JSON", help="As MOONCAKE_CONFIG_PATH: measure this store too."),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            min=1, max=64, envvar="VLLM_MOONCAKE_LOAD_RECV_THREADS", help="Receive threads of the deployment."
        ),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure what the layer costs this machine's scheduler and, given a store, what its loads take."""
    from singleflight import console
    from singleflight.embedded import spawned

    for name, where in (("--out", out.absolute().parent), ("--mooncake-config", mooncake_config)):
        if where is not None and not where.exists():
            stop(f"{name}: {where} does not exist; give one that does")
    if find_spec("vllm") is None:
        stop("This needs vLLM, which is not installed: pip install 'kv-singleflight[cpu]' (or [gpu])")
    argv = [sys.executable, "-m", "connector_patch.calibrate", "--out", str(out), "--threads", str(threads)]
    argv += ["--mooncake-config", str(mooncake_config)] if mooncake_config else []
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder, console.orderly(), console.progress() as bar:
        bar.add_task("measuring the coordination cost" + (" and the store" if mooncake_config else ""))
        log = Path(folder) / "log"
        with spawned(argv, log=log, env={**os.environ, **quiet}) as process:
            code = process.wait()
        said = log.read_text(errors="replace").splitlines()
    if code:
        stop(next((line for line in said if line.startswith("error: ")), said[-1] if said else "failed"), 1)
    if as_json:
        typer.echo(out.read_text(), nl=False)
        return
    measured = calibration.read(out)
    console.out.print(console.quantities(measured.figures.as_dict()))
    for note in measured.notes:
        console.out.print(note, highlight=False)
    console.out.print(f"Written: {out}", soft_wrap=True, highlight=False)
