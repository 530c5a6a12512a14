"""Every way a trace can be bad ends in one error that names file, line, fault and remedy."""

import gzip
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from singleflight.traces import source
from singleflight.traces.errors import TraceError
from singleflight.traces.reader import Options, TraceReader, read

Row = Callable[..., dict[str, Any]]

# name -> (the fields changed, or the whole line) and a part of what the error must say
BAD_ROWS: dict[str, tuple[Any, str]] = {
    "missing field": ({"hash_ids": ...}, "'hash_ids' is missing"),
    "delta format": ({"delta": "a"}, "a delta trace, whose rows are not whole prompts"),
    "a row of another format": ({"chat_id": 1}, "unknown field 'chat_id'"),
    "session id a number": ({"session_id": 7}, "session_id is 7"),
    "delay and no time": ({"session_id": "a", "delay": 2000, "timestamp": ...}, "and no trace says when"),
    "delay beside a time": ({"session_id": "a", "delay": 2000}, "two times"),
    "the prompt itself": ({"messages": [{"role": "user"}], "hash_ids": ...}, "'messages', the prompt itself"),
    "timestamp a string": ({"timestamp": "12"}, "timestamp is \"12\", a JSON string"),
    "timestamp a fraction": ({"timestamp": 1.5}, "whole milliseconds"),
    "timestamp a boolean": ({"timestamp": True}, "a JSON boolean"),
    "timestamp null": ({"timestamp": None}, "a JSON null"),
    "timestamp negative": ({"timestamp": -1}, "timestamp is -1"),
    "timestamp huge": ({"timestamp": 10**400}, "over 77 digits"),
    "timestamp beyond 2**53": ({"timestamp": 2**53 + 1}, "0 to 2**53"),
    "length a boolean": ({"input_length": True}, "input_length is true, a JSON boolean"),
    "length a float": ({"input_length": 1000.0}, "input_length is 1000.0, a JSON fraction"),
    "length zero": ({"input_length": 0}, "input_length is 0"),
    "output negative": ({"output_length": -1}, "output_length is -1"),
    "no hashes": ({"hash_ids": []}, "hash_ids is empty"),
    "hashes no array": ({"hash_ids": 7}, "hash_ids is a JSON integer"),
    "hashes an object": ({"hash_ids": {"1": 2}}, "hash_ids is a JSON object"),
    "hash a string": ({"hash_ids": ["7", "0007"]}, 'holds "7", a JSON string'),
    "hash a hex string": ({"hash_ids": [1, "0xff"]}, 'holds "0xff"'),
    "hash a float": ({"hash_ids": [1, 2.0]}, "holds 2.0, a JSON fraction"),
    "hash a boolean": ({"hash_ids": [1, True]}, "holds true, a JSON boolean"),
    "hash negative": ({"hash_ids": [1, -2]}, "holds -2"),
    "hash over 64 bits": ({"hash_ids": [1, 2**64]}, "0 to 2**64 - 1"),
    "hash immense": ({"hash_ids": [1, 10**300]}, "over 77 digits"),
    "too few hashes": ({"input_length": 1025}, "ceil(input_length / 512) = 3"),
    "too many hashes": ({"input_length": 512}, "ceil(input_length / 512) = 1"),
    "malformed": (b'{"timestamp": 0, "input_length"', "malformed JSON"),
    "trailing data": (b"{} {}", "malformed JSON"),
    "NaN": (b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "NaN"),
    "Infinity": (b'{"timestamp": -Infinity, "hash_ids": [1]}', "Inf"),
    "field twice": (b'{"timestamp": 0, "timestamp": 1}', "'timestamp' appears twice"),
    "array row": (b"[0, 1000, 5, [1, 2]]", "is a JSON array"),
    "string row": (b'"x"', "is a JSON string"),
    "blank": (b"", "is blank"),
    "spaces": (b"   ", "is blank"),
    "CRLF": (b'{"timestamp": 0}\r', "CR LF"),
    "NUL run": (b"\0" * 4096, "NUL"),
    "not UTF-8": (b'{"timestamp": "\xff"}', "not UTF-8"),
    "UTF-16": ('{"timestamp": 0}'.encode("utf-16"), "NUL"),
    "BOM": (b"\xef\xbb\xbf{}", "byte order mark"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "endless digits": (b'{"timestamp": ' + b"9" * 10_000 + b"}", "out of all range"),
    "endless exponent": (b'{"timestamp": 1e99999999999999999999}', "out of all range"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row(name: str, write: Callable[..., str], good_row: Row) -> None:
    change, said = BAD_ROWS[name]
    bad = change if type(change) is bytes else good_row(**change)
    path = write(good_row(), bad, good_row())
    with pytest.raises(TraceError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    # json.dumps quotes with ", the reader shows names with '
    assert said.replace("'", '"') in str(caught.value).replace("'", '"')
    assert "; accepted: " in str(caught.value)
    assert len(str(caught.value)) < len(path) + 400
    # The same line is left out, and reported, when one bad line is allowed.
    reader = TraceReader(path, Options(skip_bad=1))
    assert len(list(reader)) == 2
    assert [str(each) for each in reader.skipped] == [str(caught.value)]
    assert "left out 1 bad lines" in reader.notices[0]


def test_unsorted_rows_are_bad_unless_sorting_is_asked_for(write: Callable[..., str], good_row: Row) -> None:
    times = [(5, 1), (3, 2), (5, 3), (3, 4)]
    path = write(*(good_row(timestamp=t, output_length=n) for t, n in times))
    with pytest.raises(TraceError, match=r"trace.jsonl:2: timestamp 3 ms is before .* \(5 ms\)"):
        read(path)
    reader = TraceReader(path, Options(sort=True))
    assert [(r.timestamp_ms, r.lengths.output) for r in reader] == [(3, 2), (3, 4), (5, 1), (5, 3)]
    assert any("not in timestamp order" in notice for notice in reader.notices)
    reader = TraceReader(path, Options(skip_bad=2))
    assert [r.timestamp_ms for r in reader] == [5, 5]


def test_a_sorted_trace_needs_no_notice(write: Callable[..., str], good_row: Row) -> None:
    reader = TraceReader(write(good_row(), good_row()), Options(sort=True))
    assert len(list(reader)) == 2
    assert reader.notices == []


def test_one_bad_line_too_many(write: Callable[..., str], good_row: Row) -> None:
    path = write(b"x", good_row(), b"y", b"z")
    with pytest.raises(TraceError, match=r"trace.jsonl:4: malformed") as caught:
        read(path, Options(skip_bad=2))
    assert caught.value.__notes__ == ["2 bad lines before it were skipped, as --skip-bad allows"]


def test_only_bad_lines_are_no_trace(write: Callable[..., str]) -> None:
    with pytest.raises(TraceError, match="holds no request"):
        read(write(b"x", b"y"), Options(skip_bad=5))


def test_the_first_line_of_a_bom_file(write: Callable[..., str], good_row: Row) -> None:
    path = write(b"\xef\xbb\xbf" + json.dumps(good_row()).encode())
    with pytest.raises(TraceError, match=r"trace.jsonl:1: starts with a byte order mark"):
        read(path)


def test_files_that_are_none(tmp_path: Path, write: Callable[..., str]) -> None:
    with pytest.raises(TraceError, match="is a directory"):
        read(str(tmp_path))
    with pytest.raises(TraceError, match="No such file"):
        read(str(tmp_path / "absent.jsonl"))
    with pytest.raises(TraceError, match="not a possible file name"):
        read("a\0b")
    with pytest.raises(TraceError, match="holds no request"):
        read(write(name="empty.jsonl"))
    with pytest.raises(TraceError, match=r"elf.jsonl:1: "):
        read(write(b"\x7fELF\x02\x01\x01" + bytes(200), name="elf.jsonl"))
    with pytest.raises(TraceError, match=r"noise.bin:\d+: "):
        read(write(random.Random(1).randbytes(5000), name="noise.bin"))


@pytest.mark.parametrize(
    ("pack", "suffix"), [(gzip.compress, ".gz"), (zstandard.ZstdCompressor().compress, ".zst")]
)
class TestCompressed:
    @pytest.fixture
    def packed(self, pack: Callable[[bytes], bytes], good_row: Row) -> bytes:
        rng = random.Random(3)
        rows = [good_row(hash_ids=[rng.getrandbits(64), rng.getrandbits(64)]) for _ in range(500)]
        return pack("".join(json.dumps(each) + "\n" for each in rows).encode())

    def test_whole(self, packed: bytes, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"t.jsonl{suffix}"
        path.write_bytes(packed)
        reader = TraceReader(str(path))
        assert len(list(reader)) == 500
        assert reader.name == "t"

    def test_two_members(self, packed: bytes, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"t.jsonl{suffix}"
        path.write_bytes(packed + packed)
        assert len(read(str(path))) == 1000

    @pytest.mark.parametrize("keep", [3, 12, 0.3, 0.9, -1])
    def test_truncated(self, packed: bytes, suffix: str, tmp_path: Path, keep: float) -> None:
        path = tmp_path / f"t.jsonl{suffix}"
        size = int(keep * len(packed)) if 0 < keep < 1 else int(keep)
        path.write_bytes(packed[:size])
        with pytest.raises(TraceError, match=r"t\.jsonl.*:\d+: .*(damaged or cut off|name says|malformed)"):
            read(str(path))

    @pytest.mark.parametrize("at", [0.2, 0.5, 0.9])
    def test_damaged(self, packed: bytes, suffix: str, tmp_path: Path, at: float) -> None:
        path = tmp_path / f"t.jsonl{suffix}"
        spot = int(at * len(packed))
        path.write_bytes(
            packed[:spot] + bytes(b ^ 0x55 for b in packed[spot : spot + 40]) + packed[spot + 40 :]
        )
        with pytest.raises(TraceError, match=r":\d+: "):
            read(str(path))

    def test_garbage_after_the_end(self, packed: bytes, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"t.jsonl{suffix}"
        path.write_bytes(packed + b"garbage")
        with pytest.raises(TraceError, match="damaged or cut off"):
            read(str(path))

    def test_named_as_plain(self, packed: bytes, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_bytes(packed)
        with pytest.raises(TraceError, match=r"t.jsonl:1: the content is (gzip|zstd), the name says plain"):
            read(str(path))

    def test_plain_named_as_packed(
        self, packed: bytes, suffix: str, write: Callable[..., str], good_row: Row
    ) -> None:
        with pytest.raises(TraceError, match="the content is plain, the name says"):
            read(write(good_row(), name=f"t.jsonl{suffix}"))


def test_a_200_mb_line_is_refused_in_bounded_memory(tmp_path: Path, good_row: Row) -> None:
    path = tmp_path / "long.jsonl"
    good = json.dumps(good_row()).encode()
    with open(path, "wb") as file:
        file.write(good + b"\n[")
        os.truncate(path, 200_000_000)  # a hole: no disk, and NULs to read
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"long.jsonl:2: is longer than 16 MiB"):
        read(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * source.MAX_LINE
    with open(path, "ab") as file:
        file.write(b"\n" + good + b"\n")
    reader = TraceReader(str(path), Options(skip_bad=1))
    assert len(list(reader)) == 2
    assert [each.line for each in reader.skipped] == [2]


def test_a_zstd_bomb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(bytes(400_000_000)))
    tracemalloc.start()
    with pytest.raises(TraceError, match="is longer than 16 MiB"):
        read(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150_000_000


@pytest.mark.parametrize(
    "header",
    [
        b"TIMESTAMP,ContextTokens,GeneratedTokens",
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    ],
)
def test_traces_without_hashes_are_refused_by_name(header: bytes, write: Callable[..., str]) -> None:
    path = write(header, b"5,ChatGPT,472,18,490,Conversation log", name="trace.csv")
    with pytest.raises(TraceError, match=r"trace.csv:1: an? (Azure|BurstGPT) .*no content identity"):
        read(path, Options(skip_bad=1000))  # no allowance mends it


@pytest.mark.parametrize(
    "options", [{"format": "csv"}, {"block_size": 0}, {"block_size": -16}, {"skip_bad": -1}]
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        TraceReader("x", Options(**options))
