"""Whatever bytes come, a reader gives requests that keep their promises, or a TraceError. Nothing else."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from singleflight.traces.errors import TraceError
from singleflight.traces.reader import FORMATS, Options, TraceReader

GOOD = {
    "mooncake": {"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [1, 2**64 - 1]},
    "qwen-bailian": {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 0.5,
        "input_length": 20,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": [1, 2],
    },
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
fields = st.sampled_from([*GOOD["qwen-bailian"], "session_id", "x"])


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good row with fields replaced or dropped, then bytes of its text changed."""
    row: dict[str, Any] = dict(draw(st.sampled_from(list(GOOD.values()))))
    for name in draw(st.lists(fields, max_size=3)):
        if draw(st.booleans()):
            row.pop(name, None)
        else:
            row[name] = draw(json_values)
    line = bytearray(json.dumps(row).encode())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(line)))
        cut = draw(st.integers(0, 4))
        line[at : at + cut] = draw(st.binary(max_size=6))
    return bytes(line)


contents = st.one_of(
    st.binary(max_size=300),
    st.lists(mutated(), min_size=1, max_size=6).map(b"\n".join),
    st.lists(mutated(), min_size=1, max_size=6).map(b"\r\n".join),
)
options = st.builds(
    Options,
    format=st.sampled_from(["auto", *FORMATS]),
    unit=st.sampled_from([None, "ms", "s"]),
    block_size=st.sampled_from([None, 1, 16, 2**40]),
    skip_bad=st.sampled_from([0, 1, 1000]),
    sort=st.booleans(),
)

fuzzed = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(path: Path, how: Options) -> None:
    reader = TraceReader(str(path), how)
    fault = None
    try:
        requests = list(reader)
    except TraceError as caught:
        fault = caught
    if fault:
        assert str(fault).startswith(str(path))
        return
    assert requests
    assert len(reader.skipped) <= how.skip_bad
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    for request in requests:
        assert type(request.timestamp_ms) is int
        assert 0 <= request.timestamp_ms <= 2**53
        assert all(type(h) is int and 0 <= h < 2**64 for h in request.hashes)
        assert len(request.hashes) == -(-request.lengths.input // (reader.block_size or 0))


@fuzzed
@given(content=contents, how=options)
@example(content=b'{"timestamp": 1e999999999999999999999}', how=Options())
@example(
    content=b'{"timestamp": 1E+999999, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
    how=Options(unit="s"),
)
@example(
    content=b'{"timestamp": 1e-999999, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
    how=Options(unit="s"),
)
@example(
    content=b'{"timestamp": -0.0, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
    how=Options(unit="s"),
)
@example(content=b'{"\\ud800": 1}', how=Options())
def test_plain(content: bytes, how: Options, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    check(path, how)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@fuzzed
@given(content=contents, data=st.data(), how=options)
def test_compressed_then_damaged(
    suffix: str, content: bytes, data: st.DataObject, how: Options, tmp_path: Path
) -> None:
    packed = bytearray(
        gzip.compress(content) if suffix == ".gz" else zstandard.ZstdCompressor().compress(content)
    )
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(packed)))
        packed[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(packed)
    check(path, how)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@fuzzed
@given(content=st.binary(max_size=200), how=options)
def test_bytes_behind_a_compressed_name(suffix: str, content: bytes, how: Options, tmp_path: Path) -> None:
    path = tmp_path / f"t.jsonl{suffix}"
    magic = b"\x1f\x8b" if suffix == ".gz" else b"\x28\xb5\x2f\xfd"
    path.write_bytes(magic + content)
    check(path, how)
