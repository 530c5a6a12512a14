"""`python -m tests.mutants`: see the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from singleflight.files.atomic import replaced

from .make import Mutant, mutants, sample

ROOT = Path(__file__).parents[2]
CORE = ("tests/core", "tests/aio/test_table_deadlines.py")
RULES = ("tests/connector/test_health.py",)
BED = (
    "tests/simulation/test_world.py",
    "tests/simulation/test_situations.py",
    "tests/simulation/test_seeds.py",
)
ENGINE = ("tests/connector/test_attach.py", "tests/faults")
FAST = {
    "singleflight/core/flight.py": CORE,
    "singleflight/core/table.py": CORE,
    "singleflight/core/estimate.py": CORE,
    "singleflight/core/breaker.py": CORE,
    "singleflight/core/broken.py": CORE,
    "connector_patch/rules.py": RULES + BED,
    "connector_patch/attach.py": BED,
    "connector_patch/park.py": RULES + BED,
    "connector_patch/allocation.py": BED,
    "connector_patch/mooncake.py": BED,
    "connector_patch/worker.py": BED,
    "connector_patch/partial.py": BED,
    "connector_patch/windows.py": ("tests/connector/test_windows.py", "tests/simulation/test_windows.py"),
    "connector_patch/health.py": RULES + BED,
}
SECONDS = {CORE: 120, ENGINE: 1500}
"""A mutant that makes a suite run so long is noticed. Suites with the simulation: `BED_SECONDS`."""
BED_SECONDS = 400

app = typer.Typer()


@contextmanager
def copies(number: int) -> Iterator[SimpleQueue[Path]]:
    """So many copies of the tree, each for one mutant at a time."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for index in range(number):
            copy = Path(folder) / str(index)
            copy.mkdir()
            for name in ("singleflight", "connector_patch", "tests", "docs"):
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md")):
                shutil.copy(path, copy / path.name)
            free.put(copy)
        yield free


def killer(mutant: Mutant, free: SimpleQueue[Path], tests: tuple[str, ...], seconds: float) -> str | None:
    """The first test that fails with the mutant in place; None if it survives.

    Raises:
        RuntimeError: pytest ended without naming a test.
    """
    copy = free.get()
    path = copy / mutant.file
    intact = path.read_text()
    path.write_text(mutant.source)
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(copy / ".hypothesis")
    try:
        process = subprocess.Popen(
            argv,
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said = process.communicate(timeout=seconds)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return "(does not end)"
    finally:
        path.write_text(intact)
        free.put(copy)
    if process.returncode == 0:
        return None
    named = [line.split("::", 1)[1].split(" - ")[0] for line in said.splitlines() if _names_a_test(line)]
    if named:
        return named[0]
    if "Error" in said:  # it does not even import, or a fixture fails
        return "(collection)"
    raise RuntimeError(f"pytest ended with {process.returncode}: {said[-2000:]}")


def _names_a_test(line: str) -> bool:
    return line.startswith(("FAILED ", "ERROR ")) and "::" in line


@app.command()
def main(
    file: Annotated[list[str] | None, typer.Option(help="Only files whose path ends so.")] = None,
    most: Annotated[int, typer.Option(help="At most so many mutants of a file.")] = 40,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    survivors: Annotated[
        bool, typer.Option(help="The engine's suites against the last run's survivors.")
    ] = False,
    seed: int = 1,
    jobs: int = 2,
    out: Annotated[Path, typer.Option(help="Where the results are, and go.")] = Path("mutants.json"),
) -> None:
    """Exit 1 if a mutant survives."""
    files = [name for name in FAST if not file or any(name.endswith(end) for end in file)]
    chosen = [m for name in files for m in sample(mutants(ROOT, name), 10**9 if everything else most, seed)]
    results: dict[tuple[str, int, str, str], str | None] = {}
    if survivors:
        before = [json.loads(line) for line in out.read_text().splitlines()]
        results = {(r["file"], r["line"], r["operator"], r["becomes"]): r["killed_by"] for r in before}
        chosen = [m for m in chosen if _key(m) in results and results[_key(m)] is None]
    console = Console(stderr=True)
    with (
        copies(jobs) as free,
        ThreadPoolExecutor(jobs) as pool,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("mutants", total=len(chosen))
        tests = [ENGINE if survivors else FAST[m.file] for m in chosen]
        running = {
            pool.submit(killer, m, free, t, SECONDS.get(t, BED_SECONDS)): m
            for m, t in zip(chosen, tests, strict=True)
        }
        try:
            for done in as_completed(running):
                mutant = running[done]
                results[_key(mutant)] = done.result()
                _write(out, results)  # a script's background job sees no Ctrl-C
                if done.result() is None:
                    progress.console.print(
                        f"alive: {mutant.file}:{mutant.line} {mutant.was} -> {mutant.becomes}", markup=False
                    )
                progress.advance(task)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    table = Table("file", "mutants", "killed", "alive")
    count, alive = Counter(key[0] for key in results), Counter(k[0] for k, v in results.items() if v is None)
    for name, number in count.items():
        table.add_row(name, str(number), str(number - alive[name]), str(alive[name]))
    console.print(table)
    console.print(f"Written: {out}")
    raise typer.Exit(1 if alive.total() else 0)


def _key(mutant: Mutant) -> tuple[str, int, str, str]:
    return (mutant.file, mutant.line, mutant.operator, mutant.becomes)


def _write(out: Path, results: dict[tuple[str, int, str, str], str | None]) -> None:
    names = ("file", "line", "operator", "becomes")
    with replaced(out) as raw:
        for key, test in sorted(results.items(), key=lambda item: item[0]):
            raw.write((json.dumps({**dict(zip(names, key, strict=True)), "killed_by": test}) + "\n").encode())


if __name__ == "__main__":
    app()
