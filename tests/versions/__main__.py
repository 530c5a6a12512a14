"""`python -m tests.versions`: see the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import child, overlay, results, sdist, suite

SUPPORTED = ("0.31", "0.32", "0.33")
TESTS = ("-m", "not engine", "tests/connector")
OF_ATTACH = ("tests/simulation", "--ignore=tests/simulation/test_seeds.py")
"""Where attach mode is on."""
ON_AN_ENGINE = ("tests/connector/test_attach.py", "tests/connector/test_park_mode.py")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    versions: Annotated[list[str] | None, typer.Argument(help="Such as 0.31 0.33.0.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Stories of the simulation for each mode.")] = 300,
    out: Annotated[Path, typer.Option(help="Where results are put.")] = results.FOLDER / "versions.json",
) -> None:
    """Our tests and the simulation on other releases of vLLM; tests of engines where there is a CPU build.

    Exit 1 if anything fails on one of them. Ctrl-C ends it early; what is complete is kept.
    """
    failures: list[str] = []
    try:
        there = sdist.releases()
        for asked in versions or SUPPORTED:
            found = sdist.newest(asked, there)
            with suite.bar(f"vLLM {found.version}") as bar:
                row = _run(found, seeds, bar)
            results.put(out, str(found.version), row)
            failures += [f"{found.version}: {failure}" for failure in row["failures"]]
    except (sdist.UnavailableError, child.ChildError) as error:
        failures.append(str(error))
    except KeyboardInterrupt:
        failures.append("Interrupted.")
    _show(results.read(out))
    for failure in failures:
        suite.console.print(failure, markup=False)
    raise typer.Exit(1 if failures else 0)


def _run(found: sdist.Sdist, seeds: int, bar: Progress) -> dict[str, Any]:
    """One release: its row."""
    task = bar.add_task("download", total=None)
    python, env = overlay.made(found), overlay.environment()
    row: dict[str, Any] = {**results.stamp(), "simulation": {}}
    failures: list[str] = []

    def told(line: dict[str, Any]) -> None:
        row.update({key: line[key] for key in ("vllm", "lacks") if key in line})
        if "done" in line:
            bar.update(task, description=line["mode"], total=seeds, completed=line["done"])
        if "tally" in line:
            row["simulation"][line["mode"]] = line["tally"]
            failures.extend(f"{line['mode']}, {failure}" for failure in line["tally"]["failed"])

    child.run([str(python), "-m", "tests.versions.inside", str(seeds)], env, overlay.ROOT, told)
    more = OF_ATTACH if row["lacks"]["attach"] is None else ()
    tests = suite.run(python, (*TESTS, *more), env, overlay.ROOT, bar)
    failures += tests.failures
    try:
        folder = overlay.built(found)
    except sdist.UnavailableError as error:
        return {**row, "tests": tests.counts, "no_engine": str(error), "failures": failures}
    env = {**os.environ, "PYTHONPATH": f"{folder}:{overlay.ROOT}"}
    engine = suite.run(sys.executable, ON_AN_ENGINE, env, overlay.ROOT, bar)
    return {**row, "tests": tests.counts, "engine": engine.counts, "failures": failures + engine.failures}


def _show(found: dict[str, Any]) -> None:
    table = Table("vLLM", "attach", "park", "shadow", "tests", "on an engine", "stories", "failed")
    for version, row in found.items():
        modes = [reason or "on" for reason in row["lacks"].values()]
        stories = sum(tally["stories"] for tally in row["simulation"].values())
        tests, engine = (
            ", ".join(f"{count} {outcome}" for outcome, count in row.get(which, {}).items())
            for which in ("tests", "engine")
        )
        table.add_row(
            version,
            *modes,
            tests,
            engine or row.get("no_engine", "not run"),
            f"{stories:,}",
            str(len(row["failures"])),
        )
    Console().print(table)


if __name__ == "__main__":
    app(prog_name="python -m tests.versions")
