"""Record a live engine, gate the recording, restart with `auto`: it coalesces only where that pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from singleflight.cli import loop
from singleflight.cli.loop import BURSTS, FAN_IN, Run, Turn

if TYPE_CHECKING:
    from singleflight.stack.embedded import Stack


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)  # five engines, one after the other
def test_the_loop(stack: Stack, tmp_path: Path) -> None:
    bursty, unique = loop.run(stack, tmp_path, lambda text: None)
    assert bursty.problems() == unique.problems() == []
    assert (bursty.enable, bursty.after.mode, bursty.recorded.gets, bursty.after.gets) == (
        True,
        "attach",
        BURSTS * FAN_IN,
        BURSTS,
    )
    assert (unique.enable, unique.after.mode, unique.after.gets) == (False, "shadow", BURSTS * FAN_IN)
    assert bursty.after.tokens == bursty.recorded.tokens
    rows = (tmp_path / "bursty.jsonl").read_text().splitlines()
    assert len(rows) == BURSTS * FAN_IN


RECORDED = Run("shadow", BURSTS * FAN_IN, 1.0, {"a": [1]})
GOOD = Turn("bursty", RECORDED, True, [], replace(RECORDED, mode="attach", gets=BURSTS))


@pytest.mark.parametrize(
    ("turn", "sentence"),
    [
        (replace(GOOD, enable=False), "bursty: the verdict is no"),
        (replace(GOOD, recorded=replace(RECORDED, gets=31)), f"did 31 Gets, not {BURSTS * FAN_IN}"),
        (replace(GOOD, after=replace(GOOD.after, mode="shadow")), "bursty: auto chose shadow"),
        (replace(GOOD, after=replace(GOOD.after, gets=32)), f"there were 32 Gets, not {BURSTS}"),
        (replace(GOOD, after=replace(GOOD.after, tokens={})), "bursty: the tokens differ"),
        (replace(GOOD, workload="no reuse", after=RECORDED), "no reuse: the verdict is yes"),
    ],
)
def test_the_loop_says_what_did_not_come_out(turn: Turn, sentence: str) -> None:
    assert GOOD.problems() == []
    (problem,) = turn.problems()
    assert sentence in problem
