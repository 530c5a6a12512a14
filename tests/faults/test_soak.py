"""The soak in CI: fewer requests, in a process of its own, since it wants a small pool and short
deadlines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from connector_patch.lab import platform
from singleflight.stack.embedded import Stack

from . import soak

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("scheduling", soak.SCHEDULING)
def test_vllm_accepts_each_way_of_scheduling(stack: Stack, scheduling: str) -> None:
    """`chunked` once ended at its start: it allowed more requests than tokens in a step."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {**platform.engine_arguments(), "max_num_seqs": 128, **soak.SCHEDULING[scheduling]}
    config = EngineArgs(str(stack.model), skip_tokenizer_init=True, max_model_len=8192, **arguments)
    assert config.create_engine_config().scheduler_config.max_num_seqs > 1


@pytest.mark.slow
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
