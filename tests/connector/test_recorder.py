"""The recorder's files: readers take them as they are, whatever happened while they were written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from connector_patch import recorder
from connector_patch.recorder import Recorder, quantiles_ms
from singleflight.cli import app
from singleflight.traces.reader import Options, read

Make = Callable[..., Recorder]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    made: list[Recorder] = []

    def recorder_of(**changes: Any) -> Recorder:
        settings = {
            "path": path,
            "max_bytes": 10**6,
            "block_size": 16,
            "model": "tiny",
            "windows_ms": lambda: None,
            "on_stop": lambda error: pytest.fail(str(error)),
            **changes,
        }
        made.append(Recorder(**settings))
        return made[-1]

    yield recorder_of
    for each in made:
        each.close()


def row(rec: Recorder, at_s: float, prompt: int, output: int = 1) -> None:
    """`prompt` tokens whose full blocks hash to 0, 1, 2, ..."""
    hashes = [i.to_bytes(32) for i in range(prompt // 16)]
    rec.finished(rec._started + at_s, prompt, output, hashes)


def ids(path: Path) -> list[list[int]]:
    return [list(each.hashes) for each in read(str(path), Options(block_size=16, recording=True))]


def inspected(path: Path) -> dict[str, Any]:
    run = CliRunner().invoke(app, ["trace", "inspect", str(path), "--json"])
    assert run.exit_code == 0, run.stderr
    about: dict[str, Any] = json.loads(run.stdout)
    return about


def test_inspect_takes_it_as_it_is(make: Make, path: Path) -> None:
    """The block size comes from the header, and requests that finish later but came earlier are sorted in."""
    rec = make(windows_ms=lambda: {"count": 3, "p50": 1.5, "p99": 2, "max": 2})
    row(rec, 2.0, 40, 7)
    row(rec, 1.0, 33, 9)
    rec.close()
    about = inspected(path)
    assert (about["block_size"], about["requests"]) == (16, 2)
    assert (about["first_ms"], about["last_ms"]) == (1000, 2000)
    assert about["notices"] == []
    assert (about["lookups"], about["reuses"]) == (6, 2)
    header = json.loads(Path(f"{path}.header.json").read_text())
    assert header["schema"] == "kv-singleflight/recording/1"
    assert header["load_windows_ms"]["p50"] == 1.5


def test_ids_tell_blocks_apart_and_nothing_else(make: Make, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    for rec in (make(), make(path=other)):
        row(rec, 0, 40)
        row(rec, 0, 40)
        rec.close()
    (first, second), (elsewhere, _) = ids(path), ids(other)
    assert first[:2] == second[:2]
    assert len({*first, *second}) == 4, "blocks that are not full belong to nobody else"
    assert not {*first, *second} & {*elsewhere}, "another key"
    assert max(first) < 2**53


def test_full_files_are_put_aside_and_go_on_with_the_same_ids(make: Make, path: Path) -> None:
    rec = make(max_bytes=2000)
    for i in range(100):
        row(rec, i, 64)
        while not rec._queue.empty():  # one write a row, so that the bound is met exactly
            os.sched_yield()
    rec.close()
    aside = Path(f"{path}.1")
    assert 0 < path.stat().st_size <= 2000
    assert 1500 < aside.stat().st_size <= 2000
    assert ids(path)[0] == ids(aside)[0]
    assert inspected(path)["last_ms"] == 99_000
    assert inspected(aside)["last_ms"] < inspected(path)["first_ms"]


def test_a_new_run_puts_the_last_one_aside(make: Make, path: Path) -> None:
    for requests in (1, 2):
        rec = make()
        for _ in range(requests):
            row(rec, 0, 16)
        rec.close()
    assert (inspected(path)["requests"], inspected(Path(f"{path}.1"))["requests"]) == (2, 1)


def test_two_do_not_record_to_one_file(make: Make, path: Path) -> None:
    rec = make()
    row(rec, 0, 16)
    with pytest.raises(BlockingIOError):
        make()
    rec.close()
    assert inspected(path)["requests"] == 1


def test_a_killed_process_leaves_whole_rows(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from connector_patch.recorder import Recorder\n"
        "rec = Recorder(Path(sys.argv[1]), 10**9, 16, 'tiny', lambda: None, print)\n"
        "while True:\n"
        "    rec.finished(rec._started, 160, 1, [bytes([i]) * 32 for i in range(10)])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)]) as process:
        while not path.exists() or path.stat().st_size < 200_000:
            assert process.poll() is None
        process.kill()
    assert inspected(path)["requests"] > 500


def test_a_row_cut_off_at_the_end_is_left_out_and_said_to_be(make: Make, path: Path) -> None:
    rec = make()
    row(rec, 0, 16)
    rec.close()
    with path.open("a") as file:
        file.write('{"timestamp": 5, "input_le')
    about = inspected(path)
    assert about["requests"] == 1
    assert about["notices"] == [f"{path}:2: left out: the recording ends within this row"]
    with path.open("a") as file:
        file.write("\n")
    run = CliRunner().invoke(app, ["trace", "inspect", str(path)])
    assert run.exit_code == 2
    assert run.stderr.startswith(f"{path}:2: malformed JSON")


def test_a_disk_that_fills_up_ends_the_recording_on_a_whole_row(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    rec = make(on_stop=lambda error: stopped.set())
    row(rec, 0, 16)
    while not path.stat().st_size:
        os.sched_yield()
    write = os.write
    monkeypatch.setattr(
        recorder.os, "write", lambda file, data: write(file, data[:10] if file == rec._file else data)
    )
    row(rec, 1, 16)
    assert stopped.wait(30)
    assert inspected(path)["requests"] == 1
    row(rec, 2, 16)  # nobody is hurt
    rec.close()
    assert rec._queue.empty(), "what waited is let go"


def test_what_a_slow_disk_leaves_out_is_counted(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "WAITING_ROWS", 2)
    monkeypatch.setattr(recorder, "HEADER_EVERY_S", 0)
    reached, go_on = threading.Event(), threading.Event()

    def windows_ms() -> None:
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            go_on.wait(30)

    rec = make(windows_ms=windows_ms)
    row(rec, 0, 16)
    assert reached.wait(30)
    for _ in range(5):
        row(rec, 1, 16)
    go_on.set()
    rec.close()
    assert inspected(path)["requests"] == 1 + 2
    assert json.loads(Path(f"{path}.header.json").read_text())["dropped_requests"] == 3


def test_a_header_that_is_none_of_ours_is_one_sentence(make: Make, path: Path) -> None:
    make().close()
    path.write_text('{"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1]}\n')
    Path(f"{path}.header.json").write_text("[]")
    run = CliRunner().invoke(app, ["trace", "inspect", str(path)])
    assert run.exit_code == 2
    assert run.stderr == f"{path}.header.json: [] is not accepted; give one JSON object\n"


def test_quantiles_are_nearest_rank() -> None:
    assert quantiles_ms(0, []) is None
    assert quantiles_ms(500, [i / 1000 for i in range(100, 0, -1)]) == {
        "count": 500,
        "p50": 50,
        "p99": 99,
        "max": 100,
    }
