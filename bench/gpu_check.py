"""`make gpu-check`: does all of it work on this host? Steps one after the other, results in one folder.

`python -m bench.gpu_check --out gpu-check-out`. Meant for a host with a GPU, under 8 minutes; the same steps
run on CPU wheels, so that this script is known to work before it meets a GPU. Each step has a limit and a log
of its own, and one that fails does not stop the rest. Exit code 0 only if every step was as it should be.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from connector_patch.lab import platform
from singleflight.files.atomic import replaced
from singleflight.stack import demo
from singleflight.stack.embedded import spawned, tail

REPOSITORY = Path(__file__).parents[1]
COMMAND = str(Path(sys.executable).parent / "singleflight")
CORE = ("test_leader_fails.py", "test_cancellation.py", "test_ends_of_loads.py", "test_checksums.py")
"""Of the fault suite: what ends a load, and whose tokens and blocks that touches."""
LONG = "three_hundred"
"""Part of the name of a test that takes as long as ten others."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Step:
    """`limit_s` on a host with a GPU and nothing else to do; `headline` reads the result's one line from the
    step's log and the output folder."""

    name: str
    argv: list[str]
    limit_s: float
    headline: Callable[[str, Path], str]


@dataclass(frozen=True)
class Outcome:
    """`state`: ok, failed or timed out."""

    name: str
    state: str
    seconds: float
    limit_s: float
    says: str


def _last_json(said: str) -> Any:
    return json.loads([line for line in said.splitlines() if line.startswith(("{", "["))][-1])


def _doctor(said: str, out: Path) -> str:
    found = _last_json(said)
    grades = [finding["grade"] for finding in found]
    bad = "; ".join(f"{f['what']}: {f['says']}" for f in found if f["grade"] == "bad")
    return f"{grades.count('ok')} ok, {grades.count('note')} notes, {grades.count('bad')} bad. {bad}".strip()


def _probe(said: str, out: Path) -> str:
    found = _last_json(said)
    gets = f"{found['requests']} requests: {found['stock']['gets']} -> {found['singleflight']['gets']} Gets"
    return f"{gets}, tokens {'equal' if found['tokens_equal'] else 'NOT EQUAL'}"


def _demo(said: str, out: Path) -> str:
    found = json.loads((out / "demo" / "demo.json").read_text())
    cell = found["summary"][-1]
    ttft = f"{cell['stock']['ttft_p50_s']:.2f} -> {cell['ours']['ttft_p50_s']:.2f} s"
    equal = "equal" if found["tokens_equal"] else "NOT EQUAL"
    return f"{cell['requests']} requests, {cell['link']}: TTFT p50 {ttft}, tokens {equal}"


def _tests(said: str, out: Path) -> str:
    """pytest's last word, which is not the log's: C++ threads have theirs after it."""
    ends = [line.strip(" =") for line in said.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return ends[-1]


def _ab(said: str, out: Path) -> str:
    [cell] = json.loads((out / "ab" / "results.json").read_text())["cells"]
    arms = [f"{arm} {found['median_s']:.3f} s" for arm, found in cell["arms"].items()]
    return f"{cell['name']}, median TTFT: {', '.join(arms)}"


def steps(out: Path) -> list[Step]:
    """In this order: what fails early explains what fails later."""
    core = [f"tests/faults/{name}" for name in CORE]
    pytest = [sys.executable, "-m", "pytest", "-q", "-k", f"not {LONG}", *core]
    ab = [sys.executable, "-m", "bench.ab", "--only", "agent fan-out", "--arms", "attach"]
    ab += ["--pairs", "2", "--most", "2", "--minutes", "30", "--out", str(out / "ab")]
    return [
        Step("doctor", [COMMAND, "doctor", "--json"], 40, _doctor),
        Step("probe", [COMMAND, "probe", "--json"], 80, _probe),
        Step("demo", [COMMAND, "demo", "--out", str(out / "demo")], 120, _demo),
        Step("faults", pytest, 140, _tests),
        Step("ab", ab, 100, _ab),
    ]


def run(step: Step, out: Path, patience: float) -> Outcome:
    log, limit = out / f"{step.name}.log", step.limit_s * patience
    log.unlink(missing_ok=True)  # of an earlier run
    started = time.monotonic()
    with spawned(step.argv, log=log) as process:
        try:
            state = "failed" if process.wait(limit) else "ok"
        except subprocess.TimeoutExpired:
            state = "timed out"
    seconds = round(time.monotonic() - started, 1)
    try:
        says = step.headline(log.read_text(errors="replace"), out)
    except (OSError, LookupError, ValueError):  # it did not come that far, whatever it ended with
        says, state = tail(log), "failed" if state == "ok" else state
    return Outcome(step.name, state, seconds, limit, says)


def environment() -> dict[str, str]:
    found = demo.environment()
    if platform.on_gpu():
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        try:
            found["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found["gpu"] = f"nvidia-smi: {error}"
    return found


def markdown(found: dict[str, str], outcomes: list[Outcome]) -> str:
    rows = [
        f"| {o.name} | {o.state} | {o.seconds:.0f} of {o.limit_s:.0f} | {o.says.replace('|', '/')} |"
        for o in outcomes
    ]
    where = [f"- {name}: {value}" for name, value in found.items()]
    return "\n".join(["# Host check", "", *where, "", "| step | | s | |", "|---|---|---|---|", *rows, ""])


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for the summary, the logs and the results.")] = Path(
        "gpu-check-out"
    ),
    patience: Annotated[float, typer.Option(min=0.1, help="Limits times this: for CPU, or a busy host.")] = 1,
) -> None:
    """Doctor, probe, demo, the core of the fault suite, a short A/B."""
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(REPOSITORY)
    found, outcomes = environment(), []
    for step in steps(out):
        print(f"{step.name}, up to {step.limit_s * patience:.0f} s ...", flush=True)
        outcomes.append(run(step, out, patience))
        print(f"  {outcomes[-1].state} after {outcomes[-1].seconds:.0f} s: {outcomes[-1].says}", flush=True)
        summary = {"environment": found, "steps": [asdict(outcome) for outcome in outcomes]}
        for name, text in (("json", json.dumps(summary, indent=1)), ("md", markdown(found, outcomes))):
            with replaced(out / f"summary.{name}") as file:
                file.write(text.encode())
    print(f"Written: {out / 'summary.md'}")
    raise typer.Exit(0 if all(outcome.state == "ok" for outcome in outcomes) else 1)


if __name__ == "__main__":
    app()
