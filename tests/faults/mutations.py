"""Does the suite notice? `python -m tests.faults.mutations`: breaks chosen lines, one at a time, in a copy.

Prints, for each, the first test that fails; exit 1 if one is not noticed. Takes about a minute for each line
of attach.py, since an engine starts. The table in docs/failure-modes.md is what it printed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[2]
CORE = ("tests/unit", "tests/model")


class Mutation(NamedTuple):
    """One line, what it becomes, and the tests that are run against it."""

    file: str
    line: str
    becomes: str
    meaning: str
    tests: tuple[str, ...]


FLIGHT, TABLE, ATTACH = "singleflight/flight.py", "singleflight/table.py", "connector_patch/attach.py"
MUTATIONS = [
    Mutation(
        FLIGHT,
        "(State.OVERDUE, Event.RESET): State.DISCARDED,",
        "(State.OVERDUE, Event.RESET): State.OVERDUE,",
        "an overdue flight survives a reset and is published",
        CORE,
    ),
    Mutation(
        FLIGHT,
        "JOINABLE: Final = frozenset({State.LOADING, State.ORPHANED})",
        "JOINABLE: Final = frozenset({State.LOADING})",
        "nobody joins an orphan",
        CORE,
    ),
    Mutation(
        TABLE,
        "if self._pending.get(block_hash) == (flight, index):",
        "if block_hash in self._pending:",
        "a flight that ends takes its successor's blocks out of the table",
        CORE,
    ),
    Mutation(
        TABLE,
        "effects: list[Effect] = [] if flight.state is State.DISCARDED else [Publish(flight)]",
        "effects: list[Effect] = [Publish(flight)]",
        "what a reset has discarded is published",
        CORE,
    ),
    Mutation(
        ATTACH,
        "                self._pending[request_id].failed = True",
        "                pass",
        "failures are not seen: a failed load lands",
        ("tests/faults/test_leader_fails.py",),
    ),
    Mutation(
        ATTACH,
        "                self._no_load.add(request_id)\n                effects",
        "                effects",
        "a request whose load failed looks up and loads again",
        ("tests/faults/test_broken_keys.py",),
    ),
    Mutation(
        ATTACH,
        "                self._manager.cache_blocks(leader.request, leader.loaded_tokens)",
        "                pass",
        "landed blocks are not published",
        ("tests/faults/test_cancellation.py",),
    ),
    Mutation(
        ATTACH,
        "            self._manager.free(pending.request)\n",
        "",
        "a request that falls back keeps the blocks it had",
        ("tests/faults/test_leader_fails.py",),
    ),
    Mutation(
        ATTACH,
        "            self._to_acknowledge.add(request_id)",
        "            pass",
        "nobody is acknowledged through the worker",
        ("tests/faults/test_cancellation.py",),
    ),
    Mutation(
        ATTACH,
        "        self._carry_out(self.table.expire(self._clock()))",
        "        pass",
        "no deadline ever passes",
        ("tests/faults/test_deadlines.py",),
    ),
    Mutation(
        ATTACH,
        "stop = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_size)",
        "stop = len(request.block_hashes)",
        "a prompt of whole blocks adopts all of them, its last token is not computed",
        ("tests/connector/test_attach.py", "tests/faults/test_isolation.py"),
    ),
    Mutation(
        ATTACH,
        "            pending.fell_back = True\n        self._carry_out(self.table.reset())",
        "            pass\n        self._carry_out(self.table.reset())",
        "a leader goes on with what it loaded before a reset",
        ("tests/faults/test_reset.py",),
    ),
]


def first_failure(copy: Path, mutation: Mutation) -> str | None:
    """The first test that fails with the line broken; None if all pass. ValueError if the line is not there
    exactly once."""
    path = copy / mutation.file
    intact = path.read_text()
    if intact.count(mutation.line) != 1:
        raise ValueError(f"{mutation.file}: {intact.count(mutation.line)} times, not once: {mutation.line!r}")
    path.write_text(intact.replace(mutation.line, mutation.becomes))
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=200", *mutation.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(intact)
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S*::(\S+)", run.stdout, re.MULTILINE)
    if found is None:
        raise ValueError(f"pytest ended with {run.returncode} and named no test: {run.stdout[-2000:]}")
    return found[1]


def main() -> int:
    unnoticed = 0
    table = Table("file", "what breaks", "first test that fails")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        copy.mkdir()
        for name in ("singleflight", "connector_patch", "tests", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, copy / name)
        for mutation in track(MUTATIONS, "breaking lines", console=Console(stderr=True)):
            test = first_failure(copy, mutation)
            unnoticed += test is None
            table.add_row(Path(mutation.file).name, mutation.meaning, test or "[red]none: not noticed")
    Console(width=180).print(table)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
