"""`singleflight trace inspect|convert|synth`. Imports typer alone; each command imports what it uses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

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
    guarded,
    open_trace,
    options_of,
    print_notices,
)

if TYPE_CHECKING:
    from singleflight.traces.request import Request
    from singleflight.traces.rows import Unit

trace = typer.Typer(help="Look at, convert and make traces.", no_args_is_help=True)


@trace.command()
@guarded
def inspect(
    path: TraceArgument,
    form: FormatOption = "auto",
    unit: UnitOption = None,
    block_size: BlockOption = None,
    skip_bad: SkipOption = 0,
    sort: SortOption = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a trace is: format, unit, size, rate, reuse, and what looks wrong with it."""
    from singleflight.cli.inspect import describe, print_description

    reader = open_trace(path, options_of(form, unit, block_size, skip_bad, sort, strict))
    about = describe(reader)
    if as_json:
        typer.echo(json.dumps(about))
        return
    print_description(about)
    print_notices(reader)


@trace.command()
@guarded
def convert(
    source: TraceArgument,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="File to write, .gz or .zst to compress, or -.")
    ],
    to: Annotated[
        str, typer.Option(help="mooncake, qwen-bailian, or timed: for `vllm bench serve`.")
    ] = "mooncake",
    to_unit: Annotated[
        str | None, typer.Option(help="ms or s, if not what the target format declares.")
    ] = None,
    output_length: Annotated[
        int | None, typer.Option(min=0, help="Output tokens of requests whose trace does not say.")
    ] = None,
    form: FormatOption = "auto",
    unit: UnitOption = None,
    block_size: BlockOption = None,
    skip_bad: SkipOption = 0,
    sort: SortOption = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rewrite a trace in another format, unit or compression. Hash ids and block size stay as they are."""
    from singleflight.traces import timed, writer
    from singleflight.traces.reader import FORMATS
    from singleflight.traces.timed import TIMED

    targets = {**FORMATS, TIMED.name: TIMED}
    if to not in targets:
        raise typer.BadParameter(f"--to {to!r}; accepted: {', '.join(targets)}")
    if to_unit not in (None, "ms", "s"):
        raise typer.BadParameter(f"--to-unit {to_unit!r}; accepted: ms, s")
    target_form = targets[to]
    if target_form is TIMED and target.endswith((".gz", ".zst")):
        raise typer.BadParameter(f"{target}; accepted: a plain file, since vllm bench serve does not unpack")
    reader = open_trace(source, options_of(form, unit, block_size, skip_bad, sort, strict))
    unit_written: Unit = to_unit or target_form.unit  # type: ignore[assignment]
    requests = reader if output_length is None else _answered(reader, output_length)
    written = writer.write(target, requests, target_form, unit_written)
    print_notices(reader)
    if target_form is TIMED:
        assert reader.block_size is not None
        told = timed.options(reader.block_size, unit_written, written)
        typer.echo(f"note: {target}: vllm bench serve {told} --dataset-path {target}", err=True)
        _said(as_json, {"requests": written, "target": target, "format": to, "read_with": told.split()})
        return
    needed = []
    if reader.block_size != target_form.block_size:
        needed.append(f"--block-size {reader.block_size}")
    if to_unit not in (None, target_form.unit):
        needed.append(f"--unit {to_unit}")
    if needed:
        typer.echo(f"note: {target}: {to} declares otherwise, so read it with {' '.join(needed)}", err=True)
    _said(as_json, {"requests": written, "target": target, "format": to, "read_with": needed})


@trace.command()
@guarded
def synth(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="File to write, .gz or .zst to compress, or -.")
    ],
    pattern: Annotated[str, typer.Option(help="poisson, bursts, agents or shared.")] = "poisson",
    requests: Annotated[int, typer.Option(help="How many.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = 0,
    rate: Annotated[float, typer.Option(help="Mean groups, or requests, a second.")] = 3.0,
    fan_in: Annotated[int, typer.Option(help="Requests in a burst, children of an agent.")] = 8,
    shared_blocks: Annotated[int, typer.Option(help="Blocks a group shares.")] = 8,
    own_blocks: Annotated[int, typer.Option(help="Blocks of a request's own.")] = 16,
    spread_ms: Annotated[int, typer.Option(help="A group arrives within this.")] = 50,
    think_ms: Annotated[int, typer.Option(help="From an agent's request to its children's.")] = 2000,
    prompts: Annotated[int, typer.Option(help="System prompts of `shared`.")] = 10,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 512,
    to: Annotated[str, typer.Option(help="mooncake or qwen-bailian.")] = "mooncake",
    as_json: JsonOption = False,
) -> None:
    """Make a trace whose fan-in is known."""
    from singleflight.traces import writer
    from singleflight.traces.reader import FORMATS
    from singleflight.traces.synth import Synth, generate

    if to not in FORMATS:
        raise typer.BadParameter(f"--to {to!r}; accepted: {', '.join(FORMATS)}")
    chosen: Any = pattern
    try:
        what = Synth(
            chosen,
            requests,
            seed,
            rate,
            fan_in,
            shared_blocks,
            own_blocks,
            spread_ms,
            think_ms,
            prompts,
            block_size,
        )
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from None
    written = writer.write(target, generate(what), FORMATS[to])
    needed = [f"--block-size {block_size}"] if block_size != FORMATS[to].block_size else []
    _said(as_json, {"requests": written, "target": target, "format": to, "read_with": needed})


def _answered(requests: Iterable[Request], output_length: int) -> Iterator[Request]:
    """With this output length where there is none."""
    for request in requests:
        lengths = request.lengths
        known = lengths.output if lengths.output is not None else output_length
        yield request._replace(lengths=lengths._replace(output=known))


def _said(as_json: bool, about: dict[str, Any]) -> None:
    on_stdout = about["target"] == "-"  # the trace has it; what we say goes beside
    if as_json:
        typer.echo(json.dumps(about), err=on_stdout)
    else:
        typer.echo(f"{about['target']}: {about['requests']} requests, {about['format']}", err=on_stdout)
