"""A run: the stack and its link, the servers of each group of cells, and every cell measured."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.ab import limited, servers
from bench.ab.client import LoadError
from bench.ab.link import LinkError, shaped_link
from bench.ab.results import CellResult, Results
from bench.ab.rounds import Bench, SetLink
from bench.ab.workloads import Cell
from singleflight.stack.embedded import EmbeddedError, Stack

SEGMENT_MB = 2048
"""The store node's memory: all loads together need a quarter, so that nothing is ever evicted."""
YOUNG_S = 20.0
"""A cell gets more pairs than it must have while it has taken less than this."""


@dataclass(frozen=True)
class Plan:
    """What to measure. Attributes: pairs, most: rounds of every arm, at least and at most;
    minutes: no cell is begun after this; real_link: a shaped link if one can be made."""

    cells: Sequence[Cell]
    arms: Sequence[str]
    pairs: int
    most: int
    minutes: float
    real_link: bool


@contextlib.contextmanager
def stack_and_link(
    real_link: bool, run: Results, segment_mb: int = SEGMENT_MB
) -> Iterator[tuple[Stack, SetLink, bool]]:
    """The stack, what sets its link, and whether the in-process limiter stands in for a real one."""
    with contextlib.ExitStack() as held:
        link, reason = None, "asked for by --no-link"
        if real_link:
            try:
                link = held.enter_context(shaped_link())
            except LinkError as error:
                reason = str(error)
        if link is None:
            stack = Stack(segment_mb=segment_mb)
            run.link = f"No real link ({reason}): an in-process limiter before every Get, in all arms alike."
        else:
            stack = Stack(segment_mb=segment_mb, host=link.near, node_host=link.far, node_enter=link.enter)
            run.link = (
                "Link: the store node in a network namespace of its own, a veth pair, `tc tbf` on both ends;"
                " latency, where a workload has any, is added in the process."
            )
        held.enter_context(stack)

        def set_link(gbit_s: float | None, latency_s: float) -> None:
            if link is not None:
                link.shape(gbit_s)
            limited.write(stack.folder, None if link else gbit_s, latency_s)

        set_link(None, 0.0)
        yield stack, set_link, link is None


def measure(plan: Plan, run: Results, out: Path, console: Console) -> None:
    """Fill `run`, and write it to `out` after each cell. A cell that fails is left out, with the reason."""
    started = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        stack_and_link(plan.real_link, run) as (stack, set_link, stand_in),
        Progress(*columns, console=console) as bar,
    ):
        task = bar.add_task("starting", total=len(plan.cells))

        def say(text: str) -> None:
            bar.update(task, description=text)

        def leave_out(cell: Cell, reason: str) -> None:
            run.left_out[cell.name] = reason
            bar.console.print(f"{cell.name} left out: {reason}", highlight=False, markup=False)

        filled: set[str] = set()
        for setup, group in itertools.groupby(plan.cells, key=lambda cell: cell.setup):
            left = list(group)
            say(f"starting {len(plan.arms)} servers")
            try:
                with servers.serving(
                    stack, plan.arms, replace(setup, limited=setup.limited or stand_in)
                ) as running:
                    bench = Bench(running, set_link, stack.folder, filled, say)
                    while left and time.monotonic() - started < plan.minutes * 60:
                        cell = left.pop(0)
                        try:
                            rounds = bench.measure(cell, plan.pairs, plan.most, YOUNG_S)
                        except (LoadError, OSError) as error:
                            run.failed = True
                            leave_out(cell, str(error))
                            continue
                        run.cells.append(CellResult(cell, rounds))
                        run.minutes = (time.monotonic() - started) / 60
                        run.write(out / "results.json")
                        bar.console.print(run.cells[-1].line(), highlight=False, markup=False)
                        bar.advance(task)
            except EmbeddedError as error:
                run.failed = True
                for cell in left:
                    leave_out(cell, str(error))
            else:
                for cell in left:
                    leave_out(cell, f"the {plan.minutes:g} minutes of --minutes were over")
    run.finished = True
