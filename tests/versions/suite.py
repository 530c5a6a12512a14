"""pytest in a process of its own: the outcome of each test, and a bar meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import child

HERE = Path(__file__).parent
console = Console(stderr=True)


@dataclass
class Outcomes:
    of: dict[str, str] = field(default_factory=dict)
    """Test -> passed, failed, skipped or not collected."""
    failures: list[str] = field(default_factory=list)
    """Test and what it said."""

    @property
    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(self.of.values()).items()))


def bar(name: str) -> Progress:
    columns = (TextColumn(f"{name}: {{task.description}}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def run(
    python: Path | str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    shown: Progress,
    plugins: Sequence[str] = (),
) -> Outcomes:
    """Plug-ins are modules of this folder. ChildError if pytest itself fails."""
    found = Outcomes()
    task = shown.add_task("tests", total=None)

    def told(line: dict[str, Any]) -> None:
        if "collected" in line:
            shown.update(task, total=line["collected"])
        if "outcome" in line:
            found.of[line["test"]] = line["outcome"]
            shown.update(task, completed=len(found.of))
        if "why" in line:
            found.failures.append(f"{line.get('of', line.get('test'))}: {line['why']}")

    argv = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    for plugin in ("outcomes", *plugins):
        argv += ["-p", plugin]
    path = f"{HERE}:{env.get('PYTHONPATH', '')}"
    # All have passed, some have failed, or some could not be collected.
    child.run([*argv, *arguments], {**env, "PYTHONPATH": path}, cwd, told, ends=(0, 1, 2))
    return found
