"""`singleflight trace inspect|convert|synth`. Imports typer alone; each command imports what it uses."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from singleflight.sim.options import (
    BlockOption,
    FormatOption,
    JsonOption,
    SkipOption,
    SortOption,
    TraceArgument,
    UnitOption,
    guarded,
    open_trace,
    options_of,
    print_notices,
)

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
    as_json: JsonOption = False,
) -> None:
    """Say what a trace is: format, unit, size, rate, reuse, and what looks wrong with it."""
    from singleflight.sim.inspect import describe, print_description

    reader = open_trace(path, options_of(form, unit, block_size, skip_bad, sort))
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
    to: Annotated[str, typer.Option(help="mooncake or qwen-bailian.")] = "mooncake",
    to_unit: Annotated[
        str | None, typer.Option(help="ms or s, if not what the target format declares.")
    ] = None,
    form: FormatOption = "auto",
    unit: UnitOption = None,
    block_size: BlockOption = None,
    skip_bad: SkipOption = 0,
    sort: SortOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rewrite a trace in another format, unit or compression. Hash ids and block size stay as they are."""
    from singleflight.traces import writer
    from singleflight.traces.reader import FORMATS

    if to not in FORMATS:
        raise typer.BadParameter(f"--to {to!r}; accepted: {', '.join(FORMATS)}")
    if to_unit not in (None, "ms", "s"):
        raise typer.BadParameter(f"--to-unit {to_unit!r}; accepted: ms, s")
    reader = open_trace(source, options_of(form, unit, block_size, skip_bad, sort))
    target_form = FORMATS[to]
    written = writer.write(target, reader, target_form, to_unit)  # type: ignore[arg-type]
    print_notices(reader)
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


def _said(as_json: bool, about: dict[str, Any]) -> None:
    on_stdout = about["target"] == "-"  # the trace has it; what we say goes beside
    if as_json:
        typer.echo(json.dumps(about), err=on_stdout)
    else:
        typer.echo(f"{about['target']}: {about['requests']} requests, {about['format']}", err=on_stdout)
