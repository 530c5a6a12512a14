"""The recorder in modes other than shadow (test_shadow.py has that), and at start-up."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from connector_patch.recorder import Recorder
from singleflight.stack.arms import OURS, arm
from singleflight.stack.embedded import spawned, tail
from singleflight.traces import recording
from singleflight.traces.reader import Options, read
from tests.connector.data_parallel import ASKED
from tests.support import BLOCK, STUCK_S, blocks, salts

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.embedded import Stack

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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_engine_of_a_data_parallel_group_records_its_own_arrivals(stack: Stack, tmp_path: Path) -> None:
    """A dense model: vLLM makes each rank look like a lone engine."""
    trace, log = tmp_path / "trace.jsonl", tmp_path / "log"
    argv = [sys.executable, "-m", "tests.connector.data_parallel", str(stack.model), str(trace)]
    env = stack.env(VLLM_CPU_OMP_THREADS_BIND="0|1" if (os.cpu_count() or 1) > 1 else "0|0")
    with spawned(argv, env={**env, "PYTHONPATH": str(Path(__file__).parents[2])}, log=log) as process:
        assert process.wait(380) == 0, tail(log)
    assert not trace.exists()
    for engine, numbers in ASKED.items():
        rows = read(f"{trace}.dp{engine}", Options(block_size=BLOCK, recording=True))
        assert sorted(row.lengths.input for row in rows) == [BLOCK * number for number in numbers]


def test_a_file_that_cannot_be_written_is_one_line_and_the_server_serves(
    stack: Stack, tmp_path: Path
) -> None:
    """A disk that is not mounted must not take a service down: what it records is for later, what it serves
    is for now."""
    path = str(tmp_path / "not there" / "trace.jsonl")
    settings = {"singleflight": {"mode": "off", "record": {"path": path}}}
    with arm(stack, OURS, settings) as engine:
        engine.answer()
        prompt = [*blocks(1, salt=next(salts)), 7]
        assert engine.ask("burst", prompts={"a": prompt})["tokens"]["a"]
        said = [line for line in engine.log.read_text().splitlines() if "does not record" in line]
    assert len(said) == 1
    assert f"singleflight.record.path: '{path}' is not accepted (No such file or directory);" in said[0]
    assert "; give a file that can be written." in said[0]


def test_a_request_that_comes_in_pieces_has_no_row_and_is_counted(ours: Engine, tmp_path: Path) -> None:
    """vLLM moves its arrival time along with each piece."""
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    def piece(tokens: list[int], last: bool = False) -> Request:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=0)
        hasher = ours.core.request_block_hasher
        return Request("live", list(tokens), sampling, None, resumable=not last, block_hasher=hasher)

    def until_it_waits(prompt_tokens: int) -> None:
        limit = time.monotonic() + STUCK_S
        live = ours.scheduler.requests["live"]
        while live.status is not RequestStatus.WAITING_FOR_STREAMING_REQ or live.num_tokens < prompt_tokens:
            assert time.monotonic() < limit, f"{live.status}, {live.num_tokens} tokens"
            ours.step()

    trace = tmp_path / "trace.jsonl"
    stops: list[Exception] = []
    said: list[str] = []
    recorder = Recorder(trace, 10**6, BLOCK, "tiny", {}, lambda: None, stops.append, said.append)
    ours.connector.recorder = recorder
    try:
        first, second = (blocks(1, salt=next(salts)) for _ in range(2))
        ours.scheduler.add_request(piece(first))
        until_it_waits(len(first))
        ours.scheduler.add_request(piece(second))
        until_it_waits(len(first) + len(second))
        ours.scheduler.add_request(piece([5], last=True))
        ours.burst({"whole": [*first, 9]})
        ours.settle()
    finally:
        ours.connector.recorder = None
        recorder.close()
    assert not stops
    assert not said
    assert [row.lengths.input for row in read(str(trace), Options(block_size=BLOCK, recording=True))] == [33]
    header = recording.header_of(str(trace))
    assert header is not None
    assert header.resumable_requests == 1
