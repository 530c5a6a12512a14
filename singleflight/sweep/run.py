"""Run a grid over traces: what is on disk already is taken from there, the rest simulated, and all of it
reconciled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import joblib

from singleflight.sim.columns import Columns
from singleflight.sim.config import PHASES, Config
from singleflight.sim.counts import N_ADDITIVE, Outcome
from singleflight.sweep import work
from singleflight.sweep.backend import BackendError, Submit
from singleflight.sweep.grid import Grid, Task, code_version, tasks
from singleflight.sweep.parts import Parts


class ReconcileError(RuntimeError):
    """Counts that must add up do not: a defect of the simulator or of the machine. Nothing is reported from
    it."""


@dataclass
class Swept:
    """One trace, simulated.

    Attributes:
        outcomes: one a configuration, in the grid's order.
        cohort_files: with `--cohorts`, the Parquet files that hold their cohorts.
    """

    outcomes: list[Outcome]
    cohort_files: list[Path] = field(default_factory=list)


def sweep(
    traces: list[Columns],
    grid: Grid,
    parts: Parts,
    submit: Submit,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Swept]:
    """Simulate every configuration of the grid on every trace.

    Args:
        parts: where finished tasks are kept; usable ones are not simulated again.
        submit: runs joblib calls, see `backend.workers`.
        progress: called with configurations done and in all.

    Raises:
        ReconcileError: the results do not add up.
        BackendError: a worker runs another version of this code.
    """
    configs = grid.configs()
    wanted = set(configs)
    found: list[dict[Config, Outcome]] = [{} for _ in traces]
    files: list[list[Path]] = [[] for _ in traces]

    def take(trace: int, outcomes: tuple[Outcome, ...], cohort_file: Path | None) -> None:
        found[trace].update((outcome.config, outcome) for outcome in outcomes)
        if cohort_file:
            files[trace].append(cohort_file)
        progress(sum(map(len, found)), len(configs) * len(traces))

    for trace, outcomes, cohort_file in parts.load():
        new = {outcome.config for outcome in outcomes}
        # A cohort file cannot be used in part: rows of other configurations, or of ones already there,
        # would come along.
        if new <= wanted and not new & found[trace].keys():
            take(trace, outcomes, cohort_file)

    todo: list[Task] = []
    for trace, columns in enumerate(traces):
        missing = [config for config in configs if config not in found[trace]]
        todo += tasks(trace, missing, columns.n_lookups)
    # The long ones first, so that no worker is left with one at the end.
    todo.sort(key=lambda task: -len(task.configs) * traces[task.trace].n_lookups)
    if parts.cohorts:
        parts.folder.mkdir(parents=True, exist_ok=True)
    calls = (
        joblib.delayed(work.run)(
            task, traces[task.trace], str(parts.cohort_file(task).absolute()) if parts.cohorts else None
        )
        for task in todo
    )
    for done in submit(calls) if todo else ():
        if done.code != code_version():
            raise BackendError(
                "a worker runs another version of kv-singleflight; install the same one everywhere"
            )
        parts.save(done.task, done.outcomes)
        take(done.task.trace, done.outcomes, parts.cohort_file(done.task) if parts.cohorts else None)
    swept = [
        Swept([results[config] for config in configs], sorted(paths))
        for results, paths in zip(found, files, strict=True)
    ]
    for each, columns in zip(swept, traces, strict=True):
        reconcile(each.outcomes, columns)
    return swept


def reconcile(outcomes: list[Outcome], columns: Columns) -> None:
    """Check R11 and R12 where they can fail: on what is about to be reported.

    Raises:
        ReconcileError: hits + attempts != lookups, cohorts + removable != attempts, the instances do not add
            up to the phase, or the phases to the trace.
    """
    for outcome in outcomes:
        rows = [outcome.phase(phase) for phase in PHASES]
        for phase, row in zip(PHASES, rows, strict=True):
            parts = [each[phase] for each in outcome.instances]
            for counts in (row, *parts):
                if (
                    counts.hits + counts.attempts != counts.lookups
                    or counts.cohorts + counts.removable != counts.attempts
                ):
                    raise ReconcileError(f"{outcome.config}, {phase}: {counts} does not add up")
            sums = [sum(column) for column in zip(*parts, strict=True)][:N_ADDITIVE]
            if sums != list(row[:N_ADDITIVE]) or row.max_fanin != max(each.max_fanin for each in parts):
                raise ReconcileError(f"{outcome.config}, {phase}: instances do not add up to the row")
        if sum(row.requests for row in rows) != columns.n_requests:
            raise ReconcileError(f"{outcome.config}: requests of the phases are not those of the trace")
        if sum(row.lookups for row in rows) != columns.n_lookups:
            raise ReconcileError(f"{outcome.config}: lookups of the phases are not those of the trace")
