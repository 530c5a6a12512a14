"""The matrix: every load fits the model, shares what it says it shares, and leaves the store as it was."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench.ab import workloads
from bench.ab.servers import Setup

MODEL_TOKENS = 8192
KV_BLOCK = 32


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two short traces, with a prompt that is far too long for the model."""
    rows = [
        {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": list(range(14))},
        {"timestamp": 3000, "input_length": 120_000, "output_length": 9, "hash_ids": list(range(235))},
        {"timestamp": 3000, "input_length": 7, "output_length": 9, "hash_ids": [900]},
        {"timestamp": 60_000, "input_length": 600, "output_length": 9, "hash_ids": [901, 902]},
    ]
    for name in ("conversation_trace", "synthetic_trace"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_every_prompt_fits_the_model_and_names_are_unique(traces: Path) -> None:
    cells, left_out = workloads.matrix(traces)
    assert not left_out
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        for row in cell.load.rows:
            assert 0 < row["input_length"] <= MODEL_TOKENS - row["output_length"]
            assert len(row["hash_ids"]) * workloads.CHUNK >= row["input_length"]


def test_no_load_of_ours_ends_in_a_block_that_a_round_would_store(traces: Path) -> None:
    cells, _ = workloads.matrix(traces)
    ours = [cell.load for cell in cells if "trace" not in cell.name]
    for row in itertools.chain.from_iterable(load.rows for load in ours):
        assert row["input_length"] // KV_BLOCK == (row["input_length"] + row["output_length"]) // KV_BLOCK


def test_cells_that_agree_in_their_servers_stand_side_by_side(traces: Path) -> None:
    cells, _ = workloads.matrix(traces)
    runs = [setup for setup, _ in itertools.groupby(cell.setup for cell in cells)]
    assert len(runs) == len(set(runs))
    assert runs[0] == Setup()


def test_a_trace_keeps_its_pace_and_its_sharing_and_shrinks_its_prompts(traces: Path) -> None:
    load = workloads.trace(traces / "conversation_trace.jsonl", seconds=7)
    assert [row["timestamp"] for row in load.rows] == [0, 3, 3]
    assert [row["input_length"] for row in load.rows] == [844, workloads.TRACE_TOKENS, 1]
    first, second, _ = (row["hash_ids"] for row in load.rows)
    assert first[:13] == second[:13] == list(range(13))
    assert first[-1] != second[-1]


def test_without_traces_two_workloads_are_left_out_with_the_reason(tmp_path: Path) -> None:
    cells, left_out = workloads.matrix(tmp_path)
    assert set(left_out) == {"conversation_trace", "synthetic_trace"}
    assert not any("trace" in cell.name for cell in cells)


def test_a_wrong_name_is_answered_with_those_there_are(tmp_path: Path) -> None:
    cells, _ = workloads.matrix(tmp_path)
    assert [c.name for c in workloads.choose(cells, "burst of 8", quick=True)] == ["burst of 8"]
    with pytest.raises(ValueError, match=r"no workload's name contains 'bust'; they are: burst of 1, "):
        workloads.choose(cells, "bust", quick=False)
