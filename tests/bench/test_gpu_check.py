"""`make gpu-check`, with steps of the test's own; and what engines are told on a GPU, seen from a CPU."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import gpu_check
from bench.gpu_check import REPOSITORY, Step
from connector_patch.lab import memory, platform

TREE = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def _said(said: str, out: Path) -> str:
    return said.strip()


def _json(said: str, out: Path) -> str:
    return str(json.loads(said))


def test_one_bad_step_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fails, one does not end, one has no result, one is fine: all are in both summaries, and nothing of
    them is left."""
    python = [sys.executable, "-c"]
    steps = [
        Step("fails", [*python, "print('no GPU'); raise SystemExit(3)"], 60, _json),
        Step("hangs", [*python, TREE], 3, _said),
        Step("measures nothing", [*python, "print('too late')"], 60, _json),
        Step("works", [*python, "print('fine | good')"], 60, _said),
    ]
    monkeypatch.setattr(gpu_check, "steps", lambda out: steps)
    monkeypatch.chdir(REPOSITORY)
    done = CliRunner().invoke(gpu_check.app, ["--out", str(tmp_path / "out")])
    assert done.exit_code == 1, done.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(step["name"], step["state"]) for step in summary["steps"]] == [
        ("fails", "failed"),
        ("hangs", "timed out"),
        ("measures nothing", "failed"),
        ("works", "ok"),
    ]
    assert summary["steps"][0]["says"] == "no GPU", "where the result cannot be read: what the step said"
    assert 3 <= summary["steps"][1]["seconds"] < 300
    assert summary["environment"]["python"]
    assert "| works | ok |" in (tmp_path / "out" / "summary.md").read_text()
    assert "fine / good" in (tmp_path / "out" / "summary.md").read_text()
    child = int(summary["steps"][1]["says"])
    limit = time.monotonic() + 30
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < limit, "a step's child outlived its time"
        time.sleep(0.02)


def test_good_steps_end_with_0_and_patience_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step("works", [sys.executable, "-c", "print(1)"], 20, _said)
    monkeypatch.setattr(gpu_check, "steps", lambda out: [step])
    monkeypatch.chdir(REPOSITORY)
    done = CliRunner().invoke(gpu_check.app, ["--out", str(tmp_path), "--patience", "3"])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "summary.json").read_text())["steps"][0]["limit_s"] == 60


def test_it_takes_less_than_eight_minutes_and_its_tests_are_there(tmp_path: Path) -> None:
    assert sum(step.limit_s for step in gpu_check.steps(tmp_path)) <= 480
    core = "".join((REPOSITORY / "tests" / "faults" / name).read_text() for name in gpu_check.CORE)
    assert gpu_check.LONG in core


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "on_gpu", lambda: True)


PARSE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[2:])
given = EngineArgs(model="m", **json.loads(sys.argv[1]))
names = list(json.loads(sys.argv[1]))
plain = lambda value: str(getattr(value, "name", value))  # of an enum
print(json.dumps([[plain(getattr(parsed, n)), plain(getattr(given, n))] for n in names]))
"""


def test_vllm_takes_what_engines_and_servers_are_told_on_a_gpu(gpu: None) -> None:
    arguments, flags = platform.engine_arguments(), platform.server_flags()
    command = [sys.executable, "-c", PARSE, json.dumps(arguments), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    assert all(on_the_command_line == as_argument for on_the_command_line, as_argument in found)
    assert [as_argument for _, as_argument in found] == [str(value) for value in arguments.values()]


def test_two_engines_and_a_benchmarks_five_fit_one_gpu(gpu: None) -> None:
    assert 5 * platform.engine_arguments()["gpu_memory_utilization"] < 0.9


def test_a_cpu_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "on_gpu", lambda: False)
    assert (platform.engine_arguments(), platform.server_flags()) == ({}, [])


def test_memory_of_the_host_is_read_written_and_filled() -> None:
    if platform.on_gpu():
        pytest.skip("addresses are the GPU's here")
    place = ctypes.create_string_buffer(8)
    address = ctypes.addressof(place)
    memory.fill(address, 0x41, 8)
    memory.write(address + 2, b"xyz")
    assert memory.read(address, 8) == b"AAxyzAAA"
