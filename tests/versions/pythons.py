"""`python -m tests.versions.pythons`: other Pythons, with all that needs no vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from . import child, overlay, results, suite
from .sdist import CACHE

TESTS = (
    "tests/core",
    "tests/aio",
    "tests/sim",
    "tests/sweep",
    "tests/files",
    "tests/traces",
    "tests/gate",
    "tests/terminal",
    "tests/cli",
)

app = typer.Typer(add_completion=False)


class NoPythonError(Exception):
    """There is no such interpreter; one sentence."""


@app.command()
def main(
    pythons: Annotated[list[str] | None, typer.Argument(help="Such as 3.12 3.13.")] = None,
    out: Annotated[Path, typer.Option(help="Where results are put.")] = results.FOLDER / "pythons.json",
) -> None:
    """The table, the simulator, the gate and the commands on other Pythons. Exit 1 if a test fails there."""
    failures: list[str] = []
    try:
        for asked in pythons or ("3.12", "3.13"):
            python = _environment(asked)
            with suite.bar(f"Python {asked}") as bar:
                tests = suite.run(python, TESTS, os.environ, overlay.ROOT, bar)
            version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True)
            row = {**results.stamp(), "tests": tests.counts, "failures": tests.failures}
            results.put(out, version.stdout.split()[-1], row)
            failures += [f"Python {asked}: {failure}" for failure in tests.failures]
    except (NoPythonError, child.ChildError) as error:
        failures.append(str(error))
    except KeyboardInterrupt:
        failures.append("Interrupted.")
    for version, row in results.read(out).items():
        print(f"Python {version}: " + ", ".join(f"{n} {outcome}" for outcome, n in row["tests"].items()))
    for failure in failures:
        suite.console.print(failure, markup=False)
    raise typer.Exit(1 if failures else 0)


def _environment(version: str) -> Path:
    """An environment with this package and what its tests take, vLLM and Mooncake apart."""
    home = CACHE / f"python{version}"
    python, marker = home / "bin" / "python", home / "complete"
    if not marker.exists():
        with suite.console.status(f"Python {version}: installing"):
            for argv in (
                [_interpreter(version), "-m", "venv", "--clear", str(home)],
                [str(python), "-m", "pip", "install", "-q", "-e", ".[all,test]"],
            ):
                child.run(argv, os.environ, overlay.ROOT, print)
        marker.touch()
    return python


def _interpreter(version: str) -> str:
    """`pythonX.Y` of the PATH, or pyenv's."""
    found = shutil.which(f"python{version}")
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    of_pyenv = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    if of_pyenv:
        return str(of_pyenv[-1])
    if found is None:
        raise NoPythonError(f"there is no python{version} here; install it, or leave {version} out")
    return found


if __name__ == "__main__":
    app(prog_name="python -m tests.versions.pythons")
