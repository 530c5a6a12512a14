"""The recorder in modes other than shadow (test_shadow.py has that), and at start-up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from singleflight import recording
from singleflight.arms import OURS, arm
from singleflight.embedded import EmbeddedError
from singleflight.traces.reader import Options, read
from tests.support import BLOCK, blocks, salts

if TYPE_CHECKING:
    from singleflight.embedded import Stack

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("mode", "gets"), [("attach", 1), ("off", 4)])
def test_every_mode_records_arrivals_and_windows(stack: Stack, tmp_path: Path, mode: str, gets: int) -> None:
    trace = tmp_path / "trace.jsonl"
    block = blocks(1, salt=next(salts))
    asked = {f"{mode}-{i}": [*block, 7 + i] for i in range(4)}
    with arm(stack, OURS, {"singleflight": {"mode": mode, "record": {"path": str(trace)}}}) as engine:
        engine.answer()
        engine.ask("fill", prompts=[[*block, 3]])
        assert engine.ask("burst", prompts=asked, barrier=True)["counts"]["gets"] == gets
    rows = read(str(trace), Options(block_size=BLOCK, recording=True))
    assert [len(row.hashes) for row in rows] == [2] * 5
    assert len({row.hashes[0] for row in rows}) == 1
    header = recording.header_of(str(trace))
    assert header is not None
    assert header.load_windows_ms is not None
    assert header.load_windows_ms["count"] == 1, "one block was on its way once, in however many loads"


def test_a_file_that_cannot_be_written_ends_the_start_up_with_a_sentence(
    stack: Stack, tmp_path: Path
) -> None:
    path = tmp_path / "not there" / "trace.jsonl"
    with (
        arm(stack, OURS, {"singleflight": {"record": {"path": str(path)}}}) as wrong,
        pytest.raises(EmbeddedError) as error,
    ):
        wrong.answer()
    assert f"singleflight.record.path: '{path}' is not accepted (No such file or directory);" in str(
        error.value
    )
