"""What every command shares: output, progress, and how an expected failure ends."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

out = Console()
err = Console(stderr=True)

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


def stop(message: str, code: int = BAD_INPUT) -> NoReturn:
    """One sentence on stderr, and the exit code."""
    err.print(f"[bold red]error:[/] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Plain JSON on stdout, whatever the terminal."""
    typer.echo(json.dumps(value))


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """A spinner with text on stderr, so that stdout stays clean."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as shown:
        yield shown


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that everything that was started is stopped."""

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        stop("interrupted; everything that was started has been stopped", INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)
