"""Other models and settings than the suite's own engine has, on real engines (`tests.faults.configured`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.stack.embedded import spawned, tail
from tests.faults.cohort import tailed
from tests.faults.configured import SALT, TOKENS
from tests.support import blocks

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm
    from singleflight.stack.embedded import Stack

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

NAMES = ("mla", "ngram")


@pytest.fixture(scope="module")
def answers(stack: Stack) -> Iterator[dict[str, dict[str, Any]]]:
    """What each engine has come to; they run side by side."""
    with ExitStack() as running:
        processes = {}
        for name in NAMES:
            out, log = stack.folder / f"{name}.json", stack.folder / f"{name}.log"
            argv = [sys.executable, "-m", "tests.faults.configured", name, str(stack.model), str(out)]
            env = stack.env(
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                VLLM_MOONCAKE_LOAD_RECV_THREADS="4",
                VLLM_LOGGING_LEVEL="ERROR",
                PYTHONPATH=str(Path(__file__).parents[2]),
            )
            processes[name] = running.enter_context(spawned(argv, env=env, log=log)), out, log
        found = {}
        for name, (process, out, log) in processes.items():
            assert process.wait(300) == 0, tail(log)
            found[name] = json.loads(out.read_text())
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_six_requests_are_one_get_and_say_what_they_say_in_stock(
    answers: dict[str, dict[str, Any]], name: str
) -> None:
    """Multi-head latent attention (DeepSeek, Kimi), and n-gram speculation. On CPU a chunk of MLA is computed
    approximately, so the comparison is with stock, not with no connector."""
    told = answers[name]
    assert told["on"] == "attach"
    assert [told[mode]["gets"] for mode in ("stock", "attach", "park")] == [6, 1, 1]
    assert told["attach"]["tokens"] == told["park"]["tokens"] == told["stock"]["tokens"]
    assert all(len(tokens) == TOKENS for tokens in told["stock"]["tokens"].values())
    assert [told[mode]["lost"] for mode in ("attach", "park")] == [0, 0]
    assert told["published"] == told["keys"], "each was compared with the store's, byte for byte"


def test_speculation_changes_no_token(answers: dict[str, dict[str, Any]], reference: Arm) -> None:
    """The model's text is random, so hardly a draft is right; the simulation accepts some."""
    told = answers["ngram"]
    prompts = tailed(blocks(1, 2, 3, 4, salt=SALT), *(f"r{i}" for i in range(6)))
    plain = reference.ask("burst", prompts=prompts, max_tokens=TOKENS)
    for mode in ("attach", "park"):
        assert told[mode]["tokens"] == plain["tokens"]
        assert told[mode]["drafts"]["drafted"] > 0
