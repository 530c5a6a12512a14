"""`singleflight calibrate`: the measuring runs in a process of its own (`connector_patch.lab.calibrate`)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from singleflight.cli.options import JsonOption, guarded, stop
from singleflight.files import shown
from singleflight.gate import calibration
from singleflight.twin.quantity import quantities

HEARTBEAT_S = 10.0
"""Between lines that say that it goes on, where there is no terminal to draw on."""
TIERS = ("memory", "ssd")


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
    tier: Annotated[
        str, typer.Option(help="Where the store has what is loaded: memory, or ssd (enable_offload).")
    ] = "memory",
    model: Annotated[
        str | None,
        typer.Option(help="Start an engine of this model, as vLLM is told, and measure its steps too."),
    ] = None,
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="What that engine is told further: vLLM's EngineArgs.")
    ] = "{}",
    as_json: JsonOption = False,
) -> None:
    """Measure what the layer costs this machine's scheduler and, given them, what the store's loads and the
    engine's steps take."""
    from singleflight.stack import mooncake_json
    from singleflight.stack.embedded import spawned
    from singleflight.terminal import console

    if tier not in TIERS:
        raise typer.BadParameter(f"--tier {tier!r}; accepted: {', '.join(TIERS)}")
    if tier != TIERS[0] and mooncake_config is None:
        raise typer.BadParameter(f"--tier {tier} is of a store; accepted: with --mooncake-config JSON")
    _arguments(engine_args)
    for name, where in (("--out", out.absolute().parent), ("--mooncake-config", mooncake_config)):
        if where is not None and not os.path.exists(where):
            stop(f"{name}: {where} does not exist; give one that does")
    if mooncake_config is not None:
        try:
            silent = mooncake_json.read(mooncake_config).silent()
        except mooncake_json.MooncakeJsonError as fault:
            stop(f"error: {fault}", 1)
        if silent is not None:
            stop(f"error: {silent}", 1)
    if find_spec("vllm") is None:
        stop("This needs vLLM, which is not installed: pip install 'kv-singleflight[cpu]' (or [gpu])")
    argv = [sys.executable, "-m", "connector_patch.lab.calibrate", "--out", str(out)]
    argv += ["--threads", str(threads), "--tier", tier]
    argv += ["--mooncake-config", str(mooncake_config)] if mooncake_config else []
    argv += ["--model", model, "--engine-args", engine_args] if model is not None else []
    # One process: its steps are what is timed.
    quiet = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "GLOG_minloglevel": "2",
        "MC_LOG_LEVEL": "ERROR",
    }
    with tempfile.TemporaryDirectory() as folder, console.orderly(), _progress() as say:
        log = Path(folder) / "log"
        with spawned(argv, log=log, env={**os.environ, **quiet}) as process:
            code = _follow(process, log, say)
        said = log.read_text(errors="replace").splitlines()
    if code:
        stop(_failure(said), 1)
    if as_json:
        typer.echo(out.read_text(), nl=False)
        return
    measured = calibration.read(out)
    console.out.print(quantities(measured.figures.as_dict()))
    for note in measured.notes:
        console.out.print(note, markup=False, highlight=False)
    console.out.print(f"Written: {out}", soft_wrap=True, markup=False, highlight=False)


def _arguments(text: str) -> None:
    """Refuse --engine-args that are no JSON object."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise typer.BadParameter(
            f'--engine-args {shown.text(text)}; accepted: a JSON object, e.g. {{"tensor_parallel_size": 2}}'
        )


def _failure(said: list[str]) -> str:
    """What the measuring process says of its failure, with Mooncake's own last error if that is its topic."""
    told = next((line for line in said if line.startswith("error: ")), None)
    if told is None:
        return shown.text(said[-1], 500) if said else "failed"
    errors = [line for line in said if line.startswith("E") and line[1:5].isdigit()]
    if "Mooncake's client" in told and errors:
        told += f"; it said: {shown.text(errors[-1], 300)}"
    return told


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """say(what is done now, seconds since it began): a spinner, or plain lines where there is no terminal."""
    from singleflight.terminal import console

    if console.err.is_terminal:
        with console.progress() as bar:
            task = bar.add_task("starting")
            yield lambda doing, _: bar.update(task, description=doing)
        return
    last = ("", 0.0)

    def say(doing: str, elapsed_s: float) -> None:
        nonlocal last
        if doing != last[0] or elapsed_s - last[1] >= HEARTBEAT_S:
            last = (doing, elapsed_s)
            typer.echo(f"{doing} ({elapsed_s:.0f} s)", err=True)

    yield say


def _follow(process: subprocess.Popen[bytes], log: Path, say: Callable[[str, float], None]) -> int:
    """Pass on what the process says it is doing until it ends; its exit code."""
    started, doing = time.monotonic(), "importing vLLM"
    with log.open(errors="replace") as lines:
        while True:
            ended = process.poll()
            for line in lines:
                if line.startswith("progress: "):
                    doing = shown.text(line.removeprefix("progress: ").strip(), 200)
            if ended is not None:
                return ended
            say(doing, time.monotonic() - started)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
