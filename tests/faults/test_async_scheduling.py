"""The scenarios once more under asynchronous scheduling, which is vLLM's default on GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
SCENARIOS = [
    "tests/connector/test_attach.py",
    "tests/faults/test_leader_fails.py",
    "tests/faults/test_reset.py",
    "tests/faults/test_other_configurations.py",
    "tests/faults/test_isolation.py",
    "tests/faults/test_ends_of_loads.py",
]


def test_the_scenarios_hold_with_asynchronous_scheduling_patched_on() -> None:
    """vLLM turns it off on CPU; `force_async` patches it on, in a child process (this one's engine is
    synchronous). The scheduler is then one step ahead of the worker's reports: a load ends, fails or is
    aborted while the next step is scheduled already. Bursts, aborts, failing and hanging Gets, resets: the
    same tests, token by token.

    Left out is a reset that preempts running requests and then raises: patched this way, the next step ends
    in a TypeError in vLLM's model runner, with the stock connector just as with ours. So is a load that is
    over before its submission returns: its test says that nothing is left after one step, and here the
    worker is heard a step later.

    What operators and other features of vLLM do is in `tests/simulation/test_situations.py`, with this
    scheduler too."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.faults.force_async",
            "-q",
            "-x",
            "--timeout",
            "100",
            "-k",
            "not preempted and not before_its_submission",
            *SCENARIOS,
        ],
        cwd=HERE.parents[1],
        env={k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "MC_", "MOONCAKE_"))},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert "forced: AsyncScheduler" in run.stdout
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) > 70
