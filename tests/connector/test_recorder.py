"""The recorder's files: readers take them as they are, whatever happened while they were written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from connector_patch import recorder
from connector_patch.recorder import Recorder, path_of, quantiles_ms
from singleflight.cli.main import app
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
            "engine": {},
            "windows_ms": lambda: None,
            "on_stop": lambda error: pytest.fail(str(error)),
            "warn": lambda sentence: pytest.fail(sentence),
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
        "rec = Recorder(Path(sys.argv[1]), 10**9, 16, 'tiny', {}, lambda: None, print, print)\n"
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


def files_of(path: Path) -> list[Path]:
    return [path, Path(f"{path}.header.json"), Path(f"{path}.1"), Path(f"{path}.1.header.json")]


def test_nobody_else_may_read_what_it_writes(make: Make, path: Path) -> None:
    for _ in range(2):
        rec = make()
        row(rec, 0, 16)
        rec.close()
    assert {stat.S_IMODE(each.stat().st_mode) for each in files_of(path)} == {0o600}


@pytest.mark.parametrize("which", range(4))
def test_a_link_in_the_place_of_any_of_its_files_is_refused(make: Make, path: Path, which: int) -> None:
    """Somebody else may have put it there, into a folder that many can write."""
    victim = path.parent / "victim"
    victim.write_text("precious")
    path.write_text("an earlier run\n")  # so that it would be put aside
    link = files_of(path)[which]
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    with pytest.raises(OSError, match="is a link"):
        make()
    assert victim.read_text() == "precious"
    assert link.is_symlink()


def test_a_second_name_of_another_file_and_what_is_no_file_are_refused(make: Make, path: Path) -> None:
    victim = path.parent / "victim"
    victim.touch()
    path.hardlink_to(victim)
    with pytest.raises(OSError, match="is a link or no regular file"):
        make()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is a link or no regular file"):
        make()
    assert victim.read_bytes() == b""


def test_a_link_put_there_while_it_records_ends_the_recording_and_touches_nothing(
    make: Make, path: Path
) -> None:
    stopped: list[Exception] = []
    rec = make(max_bytes=500, on_stop=stopped.append)
    victim = path.parent / "victim"
    victim.write_text("precious")
    Path(f"{path}.1").symlink_to(victim)
    while not stopped:
        row(rec, 0, 64)
        os.sched_yield()
    rec.close()
    assert "is a link" in str(stopped[0])
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_records_with_one_warning(
    make: Make, path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    rec = make(max_bytes=2000, warn=said.append)
    for i in range(100):  # with several changes of file
        row(rec, i, 64)
    rec.close()
    assert inspected(path)["last_ms"] == 99_000
    assert said == [
        f"the file system of {path} has no locks ({os.strerror(code)});"
        " see to it that no other process records to this path"
    ]


def test_requests_that_came_in_pieces_are_counted_and_have_no_row(make: Make, path: Path) -> None:
    rec = make()
    row(rec, 0, 16)
    rec.left_out()
    rec.left_out()
    rec.close()
    assert inspected(path)["requests"] == 1
    assert json.loads(Path(f"{path}.header.json").read_text())["resumable_requests"] == 2
    run = CliRunner().invoke(app, ["trace", "inspect", str(path)])
    assert f"note: {path}: requests that the recording left out: 2 (streaming input)" in run.stderr


@pytest.mark.parametrize(
    ("size", "index", "engine_id", "name"),
    [
        (1, 0, "4f1c", "trace.jsonl"),
        (1, 0, None, "trace.jsonl"),
        (4, 0, "4f1c_dp0", "trace.jsonl.dp0"),  # mixture of experts: vLLM leaves the group's size as it is
        (4, 3, "4f1c_dp3", "trace.jsonl.dp3"),
        (1, 0, "4f1c_dp0", "trace.jsonl.dp0"),  # dense: each rank looks alone, but for these two
        (1, 3, "4f1c_dp3", "trace.jsonl.dp3"),
    ],
)
def test_each_engine_of_a_data_parallel_group_has_a_file_of_its_own(
    size: int, index: int, engine_id: str | None, name: str
) -> None:
    parallel = SimpleNamespace(data_parallel_size=size, data_parallel_index=index, data_parallel_rank=0)
    assert path_of(Path("/x/trace.jsonl"), parallel, engine_id) == Path("/x", name)


def test_vllm_still_keeps_the_number_of_a_dense_rank_where_it_is_looked_for() -> None:
    from vllm.config import ParallelConfig

    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=1)
    parallel.data_parallel_index = 1  # as EngineCoreProc does
    parallel.reconfigure_for_independent_dp_rank()
    assert (parallel.data_parallel_size, parallel.data_parallel_rank) == (1, 0)
    assert path_of(Path("t"), parallel, None) == Path("t.dp1")


def test_quantiles_are_nearest_rank() -> None:
    assert quantiles_ms(0, []) is None
    assert quantiles_ms(500, [i / 1000 for i in range(100, 0, -1)]) == {
        "count": 500,
        "p50": 50,
        "p99": 99,
        "max": 100,
    }
