"""The loop, closed on a real stack: record an engine, gate the recording, restart with `auto`.

Twice: a bursty load, where coalescing pays, and one without any reuse, where it cannot. Every Get goes
through a rate limit (`connector_patch.lab.instrument.Gate`), which stands for a slow store.
`python -m singleflight.cli.loop --out DIR` (`make loop`) shows it; a test asserts it.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..gate import calibration
from ..stack.arms import OURS, Arm, arm
from ..stack.embedded import EmbeddedError, Stack
from ..stack.tiny_model import ModelError
from ..terminal import console

BURSTS = 14
FAN_IN = 8
"""112 requests: the gate wants 100 after the warm-up."""
PREFIX_TOKENS = 256
BYTES_PER_S = 5e6
"""A prefix is 0.5 MB on the tiny model, 2 KiB a token: 0.1 s a load."""
FIGURES = {
    "load_latency": {"value": 0.001, "unit": "s", "origin": "given"},
    "load_bandwidth": {"value": BYTES_PER_S, "unit": "bytes/s", "origin": "given"},
}
"""What the gate is told: the loads of a burst are never alone, so the recording does not show them."""

Prompts = Mapping[str, list[int]]


def workloads() -> dict[str, list[Prompts]]:
    """Name -> bursts. `bursty`: each burst shares a prefix; `no reuse`: nobody shares anything."""

    def prompt(prefix: int, own: int) -> list[int]:
        return [*random.Random(prefix).choices(range(3, 2000), k=PREFIX_TOKENS), *[40 + own] * 8]

    def bursts(prefix_of: Callable[[int, int], int], name: str) -> list[Prompts]:
        return [{f"{name}-{i}-{j}": prompt(prefix_of(i, j), j) for j in range(FAN_IN)} for i in range(BURSTS)]

    return {
        "bursty": bursts(lambda i, j: i, "bursty"),
        "no reuse": bursts(lambda i, j: 1000 + FAN_IN * i + j, "unique"),
    }


@dataclass(frozen=True)
class Run:
    """All bursts of a workload through one engine that was cold at the start."""

    mode: str
    gets: int
    ttft_p50_s: float
    tokens: dict[str, list[int]]


@dataclass(frozen=True)
class Turn:
    """One workload around the loop."""

    workload: str
    recorded: Run
    enable: bool
    reasons: list[str]
    after: Run

    def problems(self) -> list[str]:
        """What did not come out as it must, a sentence each."""
        pays = self.workload == "bursty"
        all_gets, fewest = BURSTS * FAN_IN, BURSTS if pays else BURSTS * FAN_IN
        found = {
            f"the recorded engine ran in mode {self.recorded.mode}": self.recorded.mode != "shadow",
            f"the recorded engine did {self.recorded.gets} Gets, not {all_gets}": self.recorded.gets
            != all_gets,
            f"the verdict is {'yes' if self.enable else 'no'}": self.enable is not pays,
            f"auto chose {self.after.mode}": self.after.mode != ("attach" if pays else "shadow"),
            f"after the verdict there were {self.after.gets} Gets, not {fewest}": self.after.gets != fewest,
            "the tokens differ": self.after.tokens != self.recorded.tokens,
        }
        return [f"{self.workload}: {sentence}" for sentence, wrong in found.items() if wrong]


def run(stack: Stack, out: Path, say: Callable[[str], None]) -> list[Turn]:
    """Both workloads around the loop; recordings and verdicts stay in `out`.

    Raises:
        EmbeddedError: an engine or the gate failed.
    """
    asked = workloads()
    say("storing every prefix")
    with arm(stack, OURS, {"singleflight": {"mode": "off"}}) as engine:
        engine.answer()
        for bursts in asked.values():
            for burst in bursts:
                engine.ask("burst", prompts=burst, max_tokens=1)
    return [_turn(stack, out, name, bursts, say) for name, bursts in asked.items()]


def _turn(stack: Stack, out: Path, name: str, bursts: list[Prompts], say: Callable[[str], None]) -> Turn:
    trace = out / f"{name.replace(' ', '-')}.jsonl"
    verdict = trace.with_suffix(".verdict.json")
    say(f"{name}: recording an engine in mode auto, without a verdict")
    recorded = _run(stack, {"record": {"path": str(trace)}}, bursts)
    say(f"{name}: gating the recording")
    _gate(trace, verdict)
    say(f"{name}: the same load on a new engine that reads the verdict")
    after = _run(stack, {"gate": str(verdict)}, bursts)
    answer = json.loads(verdict.read_text())
    return Turn(name, recorded, answer["enable"], answer["reasons"], after)


def _run(stack: Stack, settings: Mapping[str, Any], bursts: list[Prompts]) -> Run:
    with arm(stack, OURS, {"singleflight": settings}) as engine:
        engine.answer()
        answers = [_burst(engine, prompts) for prompts in bursts]
        return Run(
            engine.ask("mode")["mode"],
            sum(answer["counts"]["gets"] for answer in answers),
            statistics.median(seconds for answer in answers for seconds in answer["ttft_s"].values()),
            {name: tokens for answer in answers for name, tokens in answer["tokens"].items()},
        )


def _burst(engine: Arm, prompts: Prompts) -> dict[str, Any]:
    return engine.ask("burst", prompts=prompts, bytes_per_s=BYTES_PER_S)


def _gate(trace: Path, verdict: Path) -> None:
    """All but the link comes from the recording and its header. A process of its own: where numba is loaded,
    vLLM's CPU engine does not start."""
    calibrated = verdict.with_suffix(".calibration.json")
    calibrated.write_text(json.dumps({"schema": calibration.SCHEMA, "figures": FIGURES}))
    command = "from connector_patch.command import main; main()"
    argv = [sys.executable, "-c", command, "gate", str(trace), "--out", str(verdict)]
    argv += ["--calibration", str(calibrated)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise EmbeddedError(f"the gate failed: {done.stderr.strip()}")


def main(
    out: Annotated[Path, typer.Option(help="Folder for the recordings, verdicts and loop.json.")] = Path(
        "loop-out"
    ),
) -> None:
    """Record, gate, restart with auto: once where coalescing pays, once where it cannot (two minutes)."""
    out.mkdir(parents=True, exist_ok=True)
    with console.orderly(), console.progress() as bar:
        task = bar.add_task("starting mooncake_master and a store node")
        try:
            with Stack() as stack:
                turns = run(stack, out, lambda text: bar.update(task, description=text))
        except (EmbeddedError, ModelError) as error:
            console.stop(str(error), console.FAILED)
    (out / "loop.json").write_text(json.dumps([asdict(turn) for turn in turns], indent=2) + "\n")
    table = Table("", *(turn.workload for turn in turns), title="Record, gate, restart with auto")
    table.add_row("recorded: mode, Gets", *(f"{t.recorded.mode}, {t.recorded.gets}" for t in turns))
    table.add_row("verdict", *("yes" if t.enable else "no" for t in turns))
    table.add_row("restarted: mode, Gets", *(f"{t.after.mode}, {t.after.gets}" for t in turns))
    ttfts = (f"{t.recorded.ttft_p50_s:.2f} → {t.after.ttft_p50_s:.2f}" for t in turns)
    table.add_row("TTFT p50 (s)", *ttfts)
    console.out.print(table)
    for turn in turns:
        console.out.print(f"{turn.workload}: {turn.reasons[0]}", highlight=False, soft_wrap=True)
    console.out.print(f"Written: {out}", highlight=False)
    problems = [problem for turn in turns for problem in turn.problems()]
    for problem in problems:
        console.err.print(f"[bold red]wrong:[/] {problem}", highlight=False)
    if problems:
        raise typer.Exit(console.FAILED)


if __name__ == "__main__":
    typer.run(main)
