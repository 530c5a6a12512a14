"""The work of one task, done in a worker process, here or on another machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from singleflight.sim.columns import Columns
from singleflight.sim.counts import Outcome
from singleflight.sweep.grid import Task, code_version


@dataclass(frozen=True)
class Done:
    """What a task comes back with.

    Attributes:
        task: what was asked.
        outcomes: one a configuration, in the task's order.
        code: the worker's `code_version`; another machine may have another.
    """

    task: Task
    outcomes: tuple[Outcome, ...]
    code: str


def run(task: Task, columns: Columns, cohort_file: str | None = None) -> Done:
    """Simulate the configurations of a task.

    Args:
        columns: the trace.
        cohort_file: where to write one row a cohort, see `cohorts.write`.

    Raises:
        OSError: the cohort file cannot be written.
    """
    from singleflight.sim import kernel  # the process that only hands out tasks never loads numba

    first = task.configs[0]
    engine = kernel.Kernel(kernel.lay_out(columns, first.instances, first.routing, first.warmup))

    def one_by_one() -> Iterator[Outcome]:
        for config in task.configs:
            contiguous = config.lookup == "contiguous_prefix"
            arrays = engine.run_arrays(config.w_eff_ms, config.capacity, contiguous)
            yield kernel.outcome(config, *arrays)

    if cohort_file is None:
        return Done(task, tuple(one_by_one()), code_version())
    from singleflight.sweep import cohorts

    return Done(task, cohorts.write(Path(cohort_file), columns, engine, one_by_one()), code_version())


def warm() -> None:
    """Load the compiled kernel (compile it, the first time): a worker can do so while traces are read."""
    from singleflight.sim import kernel  # noqa: F401
