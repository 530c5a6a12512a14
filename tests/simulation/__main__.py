"""`python -m tests.simulation`: many random runs; a failing one is shrunk and told."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .groups import SPECS
from .setup import MODES, STORES, Setup

app = typer.Typer(add_completion=False)
console = Console(stderr=True)


@app.command()
def main(
    seeds: Annotated[int, typer.Option(min=1, help="Stories for each mode.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    mode: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MODES)}; may be repeated.")] = None,
    keep_going: Annotated[bool, typer.Option(help="Go on after a failing seed.")] = False,
    events: Annotated[bool, typer.Option(help="Check the stream of KV events too.")] = False,
    shrink: Annotated[bool, typer.Option(help="Shrink a failing story before it is told.")] = True,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages, past compat.py's refusal.")] = 1,
    other: Annotated[
        str, typer.Option(help="Another connector in MultiConnector, `before` or `after` ours.")
    ] = "",
    spec: Annotated[str, typer.Option(help=f"KV-cache groups: {', '.join(SPECS)}.")] = "full",
    store: Annotated[str, typer.Option(help=f"What is behind: {', '.join(STORES)}.")] = "mooncake",
    fields: Annotated[
        list[str] | None, typer.Option("--set", help="A field of `Setup`, as drafts=2; may be repeated.")
    ] = None,
) -> None:
    """Random stories of vLLM's real scheduler and our connector over simulated workers.

    Exit 1 if one fails that no known bug of vLLM's or the stock connector's explains. Ctrl-C ends it early.
    """
    from . import campaign

    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    fixed: dict[str, object] = {"check_events": events, "other": other, "stages": stages, "spec": spec}
    fixed["store"] = store
    for each in fields or []:
        name, _, value = each.partition("=")
        fixed[name] = _value(name, value)
    modes = mode or ["attach", "park", "shadow", "stock"]
    failed = False
    try:
        for name in modes:
            with _bar() as bar:
                task = bar.add_task(name, total=seeds, failed=0)
                tally = campaign.run(
                    name,
                    range(first, first + seeds),
                    stop_at_failure=not keep_going,
                    told=lambda t, bar=bar, task=task: bar.update(  # type: ignore[misc]
                        task, completed=t.stories, failed=len(t.failures)
                    ),
                    **fixed,
                )
            print(tally)
            if tally.failures:
                failed = True
                _tell(name, tally.failures, shrink, fixed)
    except KeyboardInterrupt:
        console.print("Interrupted.")
        failed = True
    raise typer.Exit(1 if failed else 0)


def _value(name: str, value: str) -> object:
    """The field's value from the command line."""
    plain = getattr(Setup(), name, None)
    if plain is None or isinstance(plain, Mapping):
        raise typer.BadParameter(f"{name!r} is no field of `Setup` that can be set here")
    if isinstance(plain, str):
        return value
    try:
        return type(plain)(json.loads(value))
    except ValueError:
        raise typer.BadParameter(f"{name}: {value!r} is no {type(plain).__name__}") from None


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("failed: {task.fields[failed]}"), console=console)


def _tell(mode: str, failures: list[tuple[int, object]], shrink: bool, fixed: dict[str, object]) -> None:
    from . import seeds
    from .shrink import report
    from .shrink import shrink as shorter

    print(f"failing seeds: {', '.join(str(seed) for seed, _ in failures)}")
    seed = failures[0][0]
    story = seeds.story(seed, mode, **fixed)
    print(f"\nseed {seed}{', shrunk' if shrink else ''}:\n")
    print(report(shorter(story) if shrink else story))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") is None:
        # The order of a set of request names is part of a run: the same in every process.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    app(prog_name="python -m tests.simulation")
