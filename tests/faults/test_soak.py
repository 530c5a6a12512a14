"""The soak in CI: fewer requests, in a process of its own, since it wants a small pool and short
deadlines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_nothing_is_wrong_lost_or_stuck_in_2000_requests() -> None:
    """Hazards D, E, F, G together: random prompts, aborts, failing and hanging Gets, preemptions, resets."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", "--requests", "2000", "--seed", "7"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=880,
    )
    totals = json.loads(run.stdout.splitlines()[-1])
    assert (totals["wrong"], totals["leaked"], totals["stuck"]) == (0, 0, 0), totals
    assert run.returncode == 0
    assert totals["finished"] + totals["aborted"] + totals["errors"] == 2000
    assert totals["faults"].keys() >= {"hang", "exception", "all keys"}, "the run met what it is for"
    assert totals["fallbacks"].keys() >= {"deadline", "leader_failed"}, totals
    # Whether vLLM refuses them, and whether they meet a follower, is a matter of the machine's speed.
    assert totals["resets"] + totals["resets_refused"] > 0
