"""What the simulator's commands share: options, and how a failure becomes one line and an exit code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from singleflight.traces.errors import TraceError

if TYPE_CHECKING:
    from singleflight.sim.columns import Columns
    from singleflight.traces.reader import Options, TraceReader

F = TypeVar("F", bound=Callable[..., Any])

EXTRA = {"jinja2", "numba", "numpy", "pyarrow", "joblib", "matplotlib", "zstandard"}
BAD_INPUT, INTERRUPTED = 2, 130


def stop(message: str, code: int = BAD_INPUT) -> NoReturn:
    # Not through rich: it would wrap a path:line that editors and scripts want whole.
    typer.echo(message, err=True)
    raise typer.Exit(code)


def guarded(command: F) -> F:
    """Turn what a command may fail with into one line on standard error and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except TraceError as fault:
            stop("\n".join((str(fault), *getattr(fault, "__notes__", ()))))
        except ModuleNotFoundError as fault:
            if fault.name is None or fault.name.partition(".")[0] not in EXTRA:
                raise
            stop(f"This needs {fault.name}, which is not installed: pip install 'kv-singleflight[sim]'")
        except BrokenPipeError:  # the reader of our output has gone; so has the reason to go on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as fault:
            stop(f"{fault.filename or 'output'}: {fault.strerror or fault}", 1)
        except KeyboardInterrupt:
            stop("interrupted; nothing was written", INTERRUPTED)

    return run  # type: ignore[return-value]


def need(*modules: str) -> None:
    """Fail now, as importing them would, rather than in a worker later.

    Raises:
        ModuleNotFoundError: one is not installed.
    """
    for name in modules:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}; accepted: whole numbers, separated by commas") from None


def words(text: str) -> tuple[str, ...]:
    return tuple(each.strip().replace("-", "_") for each in text.split(","))


def share(text: str) -> tuple[int, int]:
    num, slash, den = text.partition("/")
    try:
        return int(num), int(den if slash else "1")
    except ValueError:
        raise typer.BadParameter(f"{text!r}; accepted: NUM/DEN, e.g. 1/10") from None


FormatOption = Annotated[
    str, typer.Option("--format", help="mooncake, qwen-bailian, or auto: by the fields of the first row.")
]
UnitOption = Annotated[
    str | None,
    typer.Option(
        "--unit",
        help="What timestamps count, ms or s, if not what the format declares; ms are rounded down.",
    ),
]
BlockOption = Annotated[
    int | None, typer.Option("--block-size", help="Tokens a hash id covers, if not what the format declares.")
]
SkipOption = Annotated[
    int, typer.Option("--skip-bad", help="Leave out up to this many bad lines, and report them.")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Refuse fields that the format does not know.")]
SortOption = Annotated[bool, typer.Option("--sort", help="Sort by timestamp, ties in file order.")]
WarmupOption = Annotated[
    str, typer.Option("--warmup", metavar="NUM/DEN", help="Share of the span that is warmup.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="A trace: JSON lines, .gz and .zst too, Parquet, or - for standard input."
    ),
]


def options_of(
    form: str, unit: str | None, block_size: int | None, skip_bad: int, sort: bool, strict: bool
) -> Options:
    from singleflight.traces.reader import Options

    if unit not in (None, "ms", "s"):
        raise typer.BadParameter(f"--unit {unit!r}; accepted: ms, s")
    return Options(form, unit, block_size, skip_bad, sort, strict=strict)  # type: ignore[arg-type]


def open_trace(path: str, options: Options) -> TraceReader:
    """The reader of a trace; if the connector recorded it, its header says the block size."""
    from singleflight.traces import recording
    from singleflight.traces.reader import TraceReader

    try:
        if (header := recording.header_of(path)) is not None:
            if header.left_out:
                typer.echo(f"note: {path}: {header.left_out}", err=True)
            size = options.block_size or header.block_size_tokens
            options = replace(options, block_size=size, recording=True)
    except recording.HeaderError as fault:
        stop(str(fault))
    try:
        return TraceReader(path, options)
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from None


FEW_STEADY = 100


def print_few_steady(path: str, columns: Columns, warmup: tuple[int, int]) -> None:
    """Say so where what is simulated rests on few requests: the warm-up is a share of the span, so that one
    stray timestamp can leave next to nothing after it."""
    steady = int(columns.steady(warmup).sum())
    if steady < FEW_STEADY or 10 * steady < columns.n_requests:
        typer.echo(
            f"note: {path}: {steady} of {columns.n_requests} requests come after the warm-up"
            f" ({warmup[0]}/{warmup[1]} of the span), and the figures are theirs alone",
            err=True,
        )


def print_notices(reader: TraceReader) -> None:
    """Say, beside the output, how a trace was read and what is odd about it: never a silent guess."""
    if reader.form:
        units = f"timestamps in {reader.unit}, {reader.block_size}-token blocks"
        typer.echo(f"{reader.path}: {reader.form.name}, {units}", err=True)
    for notice in reader.notices:
        typer.echo(f"note: {notice}", err=True)
