"""A model with sliding windows: a tiny Gemma 3, two windowed KV-cache groups and one of full attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from singleflight.stack import tiny_model
from singleflight.stack.arms import OURS, STOCK, arm
from tests.support import BLOCK, blocks, salts

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm
    from singleflight.stack.embedded import Stack

pytestmark = pytest.mark.engine

WINDOW = tiny_model.WINDOW // BLOCK
"""Blocks of a window, if it ends where a block does."""


@pytest.fixture(scope="module")
def arms(stack: Stack) -> Iterator[dict[str, Arm]]:
    """No connector, stock, and attach mode, each in a process of its own."""
    model = tiny_model.ensure(name=tiny_model.GEMMA)
    attach = {"singleflight": {"mode": "attach"}}
    with (
        arm(stack, "none", model=model) as plain,
        arm(stack, STOCK, model=model) as stock,
        arm(stack, OURS, attach, model=model) as ours,
    ):
        for each in (plain, stock, ours):
            each.answer()
        yield {"none": plain, "stock": stock, "attach": ours}


def test_eight_requests_for_one_cold_prefix_load_it_once(arms: dict[str, Arm]) -> None:
    """Six blocks: all of them in the full group, and the last two in each windowed one."""
    trunk = blocks(1, 2, 3, 4, 5, 6, salt=next(salts))
    prompts = {f"r{i}": [*trunk, *[7 + i] * 4] for i in range(8)}
    asked = {"prompts": prompts, "max_tokens": 12}
    tokens = {"none": arms["none"].ask("burst", **asked)["tokens"]}
    arms["attach"].ask("fill", prompts=[[*trunk, 3]])
    counts = {}
    for name in ("stock", "attach"):
        free = arms[name].ask("cold")["free_blocks"]
        answer = arms[name].ask("burst", **asked, bytes_per_s=5e5)
        tokens[name], counts[name] = answer["tokens"], answer["counts"]
        assert arms[name].ask("cold")["free_blocks"] == free
    loaded = 6 + 2 * WINDOW
    assert (counts["attach"]["gets"], counts["attach"]["keys"]) == (1, loaded)
    assert counts["attach"]["gpu_blocks"] == loaded
    assert counts["stock"]["gets"] == 8
    assert tokens["attach"] == tokens["stock"] == tokens["none"]
    assert len({tuple(said) for said in tokens["none"].values()}) > 1, "the model's output says something"
