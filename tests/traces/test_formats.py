"""What the formats declare, and that writing and reading again changes nothing."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from singleflight.traces import writer
from singleflight.traces.errors import TraceError
from singleflight.traces.reader import FORMATS, Options, TraceReader, read
from singleflight.traces.request import Lengths, Request
from singleflight.traces.synth import PATTERNS, Synth, generate

Row = Callable[..., dict[str, Any]]

CHAT = {"chat_id": 159, "parent_chat_id": 55, "type": "text", "turn": 2}


def bailian(**changes: Any) -> dict[str, Any]:
    return {
        **CHAT,
        "timestamp": 61.114,
        "input_length": 30,
        "output_length": 5,
        "hash_ids": [1, 2],
        **changes,
    }


def test_mooncake_is_milliseconds_and_512_tokens(write: Callable[..., str], good_row: Row) -> None:
    reader = TraceReader(write(good_row(timestamp=27_482)))
    assert list(reader) == [Request(27_482, [1, 2], Lengths(1000, 5))]
    assert (reader.form and reader.form.name, reader.unit, reader.block_size) == ("mooncake", "ms", 512)


def test_bailian_is_seconds_and_16_tokens(write: Callable[..., str]) -> None:
    reader = TraceReader(write(bailian(), bailian(timestamp=62)))
    assert [r.timestamp_ms for r in reader] == [61_114, 62_000]
    assert (reader.form and reader.form.name, reader.unit, reader.block_size) == ("qwen-bailian", "s", 16)


@pytest.mark.parametrize(
    "change", [{"turn": 0}, {"turn": "1"}, {"type": 3}, {"parent_chat_id": 1.5}, {"session_id": 1}]
)
def test_bailian_chat_fields_are_checked(change: dict[str, Any], write: Callable[..., str]) -> None:
    with pytest.raises(TraceError, match=rf"trace.jsonl:2: .*{next(iter(change))}"):
        read(write(bailian(), bailian(**change)))


def test_chat_fields_may_be_left_out(write: Callable[..., str]) -> None:
    bare = {
        name: value for name, value in bailian().items() if name not in ("parent_chat_id", "type", "turn")
    }
    assert len(read(write(bare))) == 1


def test_one_format_a_file(write: Callable[..., str], good_row: Row) -> None:
    with pytest.raises(TraceError, match=r":2: unknown field 'chat_id'; accepted: mooncake rows"):
        read(write(good_row(), bailian()))
    with pytest.raises(TraceError, match=r":1: unknown field 'chat_id'"):
        read(write(bailian()), Options(format="mooncake"))


def test_milliseconds_seconds_and_fractions_are_one_trace(write: Callable[..., str], good_row: Row) -> None:
    # 0.1 s steps have no exact binary fraction; none may land a millisecond off.
    times = [0, 100, 200, 300, 1100, 1234, 9_999_999_999_999]
    ms = read(write(*(good_row(timestamp=t) for t in times)))
    fractions = [f'{{"timestamp": {t // 1000}.{t % 1000:03d}, '.encode() for t in times]
    rest = b'"input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}'
    assert read(write(*(each + rest for each in fractions)), Options(unit="s")) == ms
    whole = [t for t in times if t % 1000 == 0]
    assert [
        r.timestamp_ms
        for r in read(write(*(good_row(timestamp=t // 1000) for t in whole)), Options(unit="s"))
    ] == whole


def test_other_block_sizes_are_declared(write: Callable[..., str], good_row: Row) -> None:
    path = write(good_row(input_length=100))
    with pytest.raises(TraceError, match="another --block-size"):
        read(path)
    assert len(read(path, Options(block_size=64))) == 1


def test_a_last_line_without_newline_counts(write: Callable[..., str], good_row: Row) -> None:
    assert len(read(write(good_row(), end=b""))) == 1


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_written_and_read_again(form: str, suffix: str, tmp_path: Path) -> None:
    trace = list(generate(Synth("agents", requests=300, seed=4, block_size=16)))
    trace[-1] = trace[-1]._replace(hashes=[2**64 - 1, *trace[-1].hashes[1:]])
    paths = [str(tmp_path / f"{name}.jsonl{suffix}") for name in "ab"]
    for path in paths:
        assert writer.write(path, trace, FORMATS[form]) == 300
    assert read(paths[0], Options(block_size=16)) == trace
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()  # no clock in it


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("before")

    def failing() -> Any:
        yield Request(0, [1], Lengths(1, 1))
        raise TraceError("x", 2, "is bad", "good")

    with pytest.raises(TraceError):
        writer.write(str(path), failing(), FORMATS["mooncake"])
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_standard_input_is_told_by_its_first_bytes(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = list(generate(Synth(requests=50)))
    path = tmp_path / f"t.jsonl{suffix}"
    writer.write(str(path), trace, FORMATS["mooncake"])
    from_file = TraceReader(str(path))
    assert list(from_file) == trace
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    reader = TraceReader("-")
    assert list(reader) == trace
    assert (reader.name, reader.sha256) == ("stdin", from_file.sha256)


def test_the_digest_is_of_the_file(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "t.jsonl.gz"
    writer.write(str(path), generate(Synth(requests=2000)), FORMATS["mooncake"])
    reader = TraceReader(str(path))
    list(reader)
    assert reader.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("numbers", "unit", "said"),
    [
        (range(0, 7200, 5), "ms", "--unit s"),  # two hours, in seconds, read as milliseconds
        (range(0, 7200_000, 5000), "ms", None),
        (range(0, 7200, 5), "s", None),
        (range(0, 7200_000, 5000), "s", "--unit ms"),
        (range(0, 7200_000_000, 5_000_000), "ms", "is the unit right?"),  # microseconds
        (range(10), "ms", None),  # too few to say
        ([0] * 30, "ms", "--unit s"),
    ],
)
def test_a_unit_that_looks_wrong_is_warned_about(
    numbers: Any, unit: Any, said: str | None, write: Callable[..., str], good_row: Row
) -> None:
    reader = TraceReader(write(*(good_row(timestamp=t) for t in numbers)), Options(unit=unit))
    list(reader)
    assert len(reader.notices) == (said is not None)
    assert all(f"read as {unit}; " in notice and said in notice for notice in reader.notices if said)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_synthetic_traces_are_seeded_and_in_order(pattern: Any) -> None:
    first, again, other = (list(generate(Synth(pattern, requests=400, seed=s))) for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 400
    times = [request.timestamp_ms for request in first]
    assert times == sorted(times)


@pytest.mark.parametrize(
    "bad",
    [
        {"pattern": "x"},
        {"requests": 0},
        {"fan_in": 0},
        {"rate": 0},
        {"rate": float("nan")},
        {"spread_ms": -1},
    ],
)
def test_synthetic_parameters_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        Synth(**bad)


def test_readers_need_nothing_of_the_simulator() -> None:
    code = (
        "import sys, singleflight.traces.reader, singleflight.traces.synth, singleflight.traces.writer\n"
        "print([m for m in sys.modules if m.startswith('singleflight.sim') or m in ('numpy', 'zstandard')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
