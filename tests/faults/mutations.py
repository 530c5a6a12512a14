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
CORE = ("tests/core",)


class Mutation(NamedTuple):
    """One line, what it becomes, and the tests that are run against it."""

    file: str
    line: str
    becomes: str
    meaning: str
    tests: tuple[str, ...]


FLIGHT, TABLE = "singleflight/core/flight.py", "singleflight/core/table.py"
ATTACH, RULES = "connector_patch/attach.py", "connector_patch/rules.py"
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
        RULES,
        "                self._loads[request_id].failed = True",
        "                pass",
        "failures are not seen: a failed load lands",
        ("tests/faults/test_leader_fails.py",),
    ),
    Mutation(
        RULES,
        "            self._load_no_more(load.request)\n",
        "",
        "a request whose load failed looks up and loads again",
        ("tests/faults/test_broken_keys.py",),
    ),
    Mutation(
        ATTACH,
        "        self._manager.cache_blocks(load.request, load.blocks.stop * self._block_size)",
        "        pass",
        "landed blocks are not published",
        ("tests/faults/test_cancellation.py",),
    ),
    Mutation(
        ATTACH,
        "        if self._stands_on_published(load):\n            return super()._land(load)",
        "        return super()._land(load)",
        "a child is published before its parent",
        ("tests/faults/test_event_stream.py",),
    ),
    Mutation(
        RULES,
        "        load.blocks = load.blocks[:there]\n",
        "",
        "all of a load that failed in part lands",
        ("tests/faults/test_partial_loads.py",),
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
        RULES,
        "        return self._carry_out(self.table.expire(as_of))",
        "        return set()",
        "no deadline ever passes",
        ("tests/faults/test_deadlines.py",),
    ),
    Mutation(
        RULES,
        "stop = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_size)",
        "stop = len(request.block_hashes)",
        "a prompt of whole blocks adopts all of them, its last token is not computed",
        ("tests/connector/test_attach.py", "tests/faults/test_isolation.py"),
    ),
    Mutation(
        ATTACH,
        "            pending.starts_again = True\n        super().reset()",
        "            pass\n        super().reset()",
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
