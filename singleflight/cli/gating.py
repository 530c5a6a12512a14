"""What `gate` and `report` share: options, and how they become a `Gate`. Importing this needs typer alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from singleflight.cli.options import need, open_trace, print_notices, stop
from singleflight.gate import calibration
from singleflight.gate.verdict import hub_name
from singleflight.traces import recording
from singleflight.traces.recording import Header
from singleflight.twin.figures import Figures

if TYPE_CHECKING:
    from singleflight.gate.decide import Gate
    from singleflight.gate.verdict import Verdict
    from singleflight.traces.reader import Options, TraceReader
    from singleflight.traces.request import Request

T = TypeVar("T")

MAX_SCALE = 1e6
CAPACITY = 100_000
"""Blocks, where neither the command line nor a recording says."""

TracesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE...",
        help="A trace, or a recording of each instance of one deployment: JSON lines, .gz and .zst too,"
        " Parquet, or - for standard input.",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="What `calibrate` wrote; without it, defaults."),
]
InstancesOption = Annotated[
    int, typer.Option("--instances", help="Serving instances that the trace is dealt out over.")
]
CapacityOption = Annotated[
    int | None, typer.Option("--capacity", help="KV blocks of an instance [recorded, or 100,000].")
]
RoutingOption = Annotated[str, typer.Option("--routing", help="round_robin or affinity.")]
ScaleOption = Annotated[float, typer.Option("--scale", help="Run the trace so many times as fast.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="Receive threads of an instance [recorded, or 1].")
]
SeqsOption = Annotated[int | None, typer.Option("--max-num-seqs", help="As vLLM is told [recorded, or 256].")]
BatchOption = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="As vLLM is told [recorded, or 2048].")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="What the store holds: computed (what this traffic has put there), or warm (every block)"
        " [as the recording shows, or computed].",
    ),
]
BlockBytesOption = Annotated[
    float | None, typer.Option("--block-bytes", help="Bytes of KV cache a block, all layers and ranks.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="As the deployment is told; auto mode compares.")
]


@dataclass(frozen=True)
class Asked:
    """The options as given."""

    calibrated: Path | None
    instances: int
    capacity: int | None
    routing: str
    scale: float
    threads: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    store: str | None
    block_bytes: float | None
    model: str | None


def gated(paths: Sequence[str], asked: Asked, options: Options) -> tuple[Gate, str | None]:
    """Read traces and build the gate for them; what is odd about them is printed.

    Returns:
        The gate, and the model that its verdict is for.

    Raises:
        typer.BadParameter, typer.Exit: an option or a file is not usable; TraceError: a trace is not.
    """
    _within("--scale", asked.scale, 1 / MAX_SCALE, MAX_SCALE)
    _within("--block-bytes", asked.block_bytes, 1, 1e15)
    if paths.count("-") > 1 or len({*paths}) < len(paths):
        raise typer.BadParameter(f"{' '.join(paths)}: a trace is there twice; accepted: each once")
    try:
        headers = [recording.header_of(path) for path in paths]
        figures = calibration.read(asked.calibrated).figures if asked.calibrated else Figures()
    except (recording.HeaderError, calibration.CalibrationError) as fault:
        stop(str(fault))
    _agree(paths, headers, options.block_size)
    model = _model(paths, headers, asked.model)
    readers = [open_trace(path, options) for path in paths]
    need("numba", "numpy", "matplotlib")
    from singleflight.gate import recorded
    from singleflight.gate.decide import Deployment, Gate, NotJudged, Traffic
    from singleflight.twin.instance import Instance

    traffic: list[Traffic] = []
    first: list[Request] = []
    for reader, header in zip(readers, headers, strict=True):
        rows = list(reader)
        first = first or rows
        print_notices(reader)
        _same_blocks(readers[0], reader)
        traffic.append(Traffic.of(rows, reader.path, reader.name, reader.sha256, header is not None))
    size = readers[0].block_size
    assert size is not None
    said = headers[0] or Header(size, "", None)
    seen = recorded.figures(first, said)
    routing: Any = asked.routing.replace("-", "_")
    store: Any = asked.store or recorded.store(first, size) or "computed"
    try:
        figures = figures.measured(**{name: seen[name] for name in figures.defaults() if name in seen})
        if asked.block_bytes is not None:
            figures = figures.given(kv_bytes_per_token=asked.block_bytes / size)
        instance = Instance(
            block_tokens=size,
            gpu_blocks=_told(asked.capacity, said.capacity_blocks, CAPACITY),
            receive_threads=_told(asked.threads, said.receive_threads, 1),
            max_num_seqs=_told(asked.max_num_seqs, said.max_num_seqs, 256),
            max_num_batched_tokens=_told(asked.max_num_batched_tokens, said.max_num_batched_tokens, 2048),
            store=store,
        )
        refused = next((each.attach_refused for each in headers if each and each.attach_refused), None)
        deployment = Deployment(instance, asked.instances, routing, asked.scale, refused)
        return Gate(traffic, deployment, figures), model
    except NotJudged as fault:
        stop(str(fault))
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from None


def decided(gate: Gate, model: str | None) -> Verdict:
    """Run the twin over everything that the verdict needs, with progress on standard error."""
    from singleflight.gate import report

    with _progress(gate.runs) as tell:
        for point, mode in gate.run():
            tell(f"predicted {mode} with {point}", 1)
        tell("looking for what would flip it", 0)
        return report.verdict(gate, model)


@contextmanager
def _progress(runs: int) -> Iterator[Any]:
    """tell(what has been done or is done now, how many of the runs that was)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from singleflight.terminal import console

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task("predicting TTFT with what was stated, and around it", total=runs)
        yield lambda doing, done: bar.update(task, description=doing, advance=done)


def _told(asked: T | None, recorded: T | None, otherwise: T) -> T:
    return next(each for each in (asked, recorded, otherwise) if each is not None)


def _within(option: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # refuses NaN too
        raise typer.BadParameter(f"{option} {value:g}; accepted: a number from {low:g} to {high:g}")


def _agree(paths: Sequence[str], headers: Sequence[Header | None], asked: int | None) -> None:
    """Rows are read with the block size that they were recorded with."""
    for path, header in zip(paths, headers, strict=True):
        if header is not None and asked not in (None, header.block_size_tokens):
            raise typer.BadParameter(
                f"--block-size {asked}; accepted: {header.block_size_tokens}, which"
                f" {recording.header_path(path)} says"
            )


def _same_blocks(first: TraceReader, other: TraceReader) -> None:
    if other.block_size != first.block_size:
        stop(
            f"{other.path}: blocks of {other.block_size} tokens; accepted: {first.block_size}, as"
            f" {first.path} has, since both are of one deployment"
        )


def _model(paths: Sequence[str], headers: Sequence[Header | None], asked: str | None) -> str | None:
    """The model: what --model says, with a notice where a recording says another; else the recordings'."""
    said: dict[str, str] = {}
    for path, header in zip(paths, headers, strict=True):
        if header is not None:
            said.setdefault(hub_name(header.model), str(recording.header_path(path)))
    if asked is None:
        if len(said) > 1:
            (one, where), (other, there) = list(said.items())[:2]
            stop(f"{there}: the model {other}; accepted: {one}, as {where} says, or --model for both")
        return next(iter(said), None)
    for model, where in said.items():
        if model != hub_name(asked):
            typer.echo(f"note: {where} says the model {model}; the verdict is for --model {asked}", err=True)
    return asked
