"""Traces that replay tools and data hubs write: optional and further fields, fractions, sessions, Parquet."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from singleflight.cli.main import app
from singleflight.traces import writer
from singleflight.traces.errors import TraceError
from singleflight.traces.reader import FORMATS, Options, TraceReader, read
from singleflight.traces.request import Lengths, Observed, Request
from singleflight.traces.synth import Synth, generate
from singleflight.traces.timed import TIMED

Row = Callable[..., dict[str, Any]]
Write = Callable[..., str]


def fraction(timestamp: str) -> bytes:
    rest = '"input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}'
    return f'{{"timestamp": {timestamp}, {rest}'.encode()


class TestFractions:
    def test_under_an_explicit_unit_they_are_rounded_down(self, write: Write) -> None:
        path = write(fraction("0.9"), fraction("27482.999"), fraction("27483.0"))
        assert [r.timestamp_ms for r in read(path, Options(unit="ms"))] == [0, 27_482, 27_483]

    def test_without_one_both_readings_are_named_with_their_spans(self, write: Write) -> None:
        path = write(fraction("0"), *(fraction(f"{i}.5") for i in range(1, 200)))
        with pytest.raises(TraceError) as raised:
            read(path)
        assert str(raised.value) == (
            f"{path}:2: timestamp is 1.5, a JSON fraction: the trace spans 199.5 s (1.003 requests a second)"
            " if timestamps are seconds or 0.1995 s (1,003 requests a second) if timestamps are milliseconds;"
            " accepted: whole milliseconds, or --unit s or --unit ms for fractions of either"
        )

    @pytest.mark.parametrize("unit", ["s", "ms"])
    def test_either_advice_is_the_end_of_it(self, unit: Any, write: Write) -> None:
        """Neither reading sends the user to the other one: with a rate that is possible there is none."""
        step = 1.5 if unit == "s" else 1500.5
        reader = TraceReader(write(*(fraction(repr(i * step)) for i in range(100))), Options(unit=unit))
        assert len(list(reader)) == 100
        assert reader.notices == []

    def test_from_a_stream_that_cannot_be_read_twice(
        self, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Stdin:
            buffer = io.BytesIO(fraction("1.5") + b"\n" + fraction("2.5"))

        monkeypatch.setattr("sys.stdin", Stdin)
        with pytest.raises(
            TraceError, match=r"^-:1: timestamp is 1.5, a JSON fraction; accepted: whole mill"
        ):
            read("-")


class TestFields:
    def test_an_output_length_may_be_missing_or_null(self, write: Write, good_row: Row) -> None:
        rows = read(write(good_row(output_length=...), good_row(output_length=None), good_row()))
        assert [r.lengths.output for r in rows] == [None, None, 5]

    def test_further_fields_are_ignored_with_one_notice(self, write: Write, good_row: Row) -> None:
        path = write(good_row(extra={"nvext": {"priority": 9}}, tools=[]), *[good_row(priority=1)] * 5)
        reader = TraceReader(path)
        assert len(list(reader)) == 6
        ignored = "fields that change nothing here were ignored: extra, tools, priority"
        assert reader.notices == [f"{path}: {ignored}"]

    def test_strictly_they_are_refused(self, write: Write, good_row: Row) -> None:
        path = write(good_row(), good_row(priority=1))
        with pytest.raises(
            TraceError, match=r":2: unknown field 'priority'; accepted: mooncake rows with time"
        ):
            read(path, Options(strict=True))
        run = CliRunner().invoke(app, ["trace", "inspect", path, "--strict"])
        assert run.exit_code == 2
        assert "unknown field 'priority'" in run.stderr

    def test_a_notice_is_bounded_whatever_the_fields_are_called(self, write: Write, good_row: Row) -> None:
        reader = TraceReader(write(good_row(**{f"{i}" * 500 + "\ud800\n": 1 for i in range(300)})))
        list(reader)
        (notice,) = reader.notices
        assert len(notice) < len(reader.path) + 8 * 62 + 100
        assert notice.endswith("and 292 more")
        assert notice.isprintable()


class TestSessions:
    """What rows mean is aiperf's: docs/reference/conversation-context-mode.md and its MooncakeTrace."""

    def test_a_sessions_first_row_is_a_whole_prompt(self, write: Write, good_row: Row) -> None:
        rows = read(write(good_row(session_id="a"), good_row(session_id="b"), good_row(session_id=None)))
        assert rows == [Request(0, [1, 2], Lengths(1000, 5))] * 3

    def test_a_later_turn_is_refused_since_the_answers_before_it_are_not_there(
        self, write: Write, good_row: Row
    ) -> None:
        path = write(good_row(session_id="a"), good_row(session_id="a", timestamp=9))
        with pytest.raises(
            TraceError, match=r':2: is a later turn of session "a": .*message_array_with_resp'
        ):
            read(path)

    def test_turns_that_are_declared_whole_are_read(self, write: Write, good_row: Row) -> None:
        whole = {"session_id": "a", "context_mode": "message_array_with_responses"}
        rows = read(write(good_row(**whole), good_row(**whole, timestamp=7, delay=None)))
        assert [r.timestamp_ms for r in rows] == [0, 7]

    def test_a_row_whose_time_hangs_on_an_answer_is_refused(self, write: Write, good_row: Row) -> None:
        whole = {"session_id": "a", "context_mode": "message_array_with_responses"}
        path = write(good_row(**whole), good_row(**whole, timestamp=..., delay=2.5))
        with pytest.raises(TraceError, match=r":2: has a delay \(2.5\) and no timestamp"):
            read(path)

    def test_leaving_out_bad_rows_does_not_turn_a_later_turn_into_a_first_one(
        self, write: Write, good_row: Row
    ) -> None:
        path = write(good_row(session_id="a", input_length=0), good_row(session_id="a"), good_row())
        assert len(read(path, Options(skip_bad=2))) == 1


def test_one_long_gap_is_noticed(write: Write, good_row: Row) -> None:
    """A row of another clock makes every rate meaningless without a word."""
    times = [*range(0, 3_600_000, 3_600), 12 * 3_600_000]
    path = write(*(good_row(timestamp=t) for t in times))
    reader = TraceReader(path)
    list(reader)
    assert len(reader.notices) == 1
    assert "no request for 39603.6 s of the 43200 s" in reader.notices[0]
    run = CliRunner().invoke(app, ["simulate", path, "--window-ms", "10"])
    assert "note: " + path + ": 1 of 1001 requests come after the warm-up (1/10 of the span)" in run.stderr


class TestParquet:
    @pytest.fixture
    def parquet(self, tmp_path: Path) -> Callable[..., str]:
        def to_file(columns: dict[str, Any], **options: Any) -> str:
            path = str(tmp_path / "trace.parquet")
            pq.write_table(pa.table(columns), path, **options)
            return path

        return to_file

    def columns(self, trace: list[Request], **changes: Any) -> dict[str, Any]:
        whole = {
            "timestamp": [r.timestamp_ms for r in trace],
            "input_length": [r.lengths.input for r in trace],
            "output_length": [r.lengths.output for r in trace],
            "hash_ids": pa.array([r.hashes for r in trace], pa.list_(pa.uint64())),
            **changes,
        }
        return {name: value for name, value in whole.items() if value is not ...}

    def test_it_is_the_trace_that_json_lines_are(self, parquet: Callable[..., str], tmp_path: Path) -> None:
        trace = list(generate(Synth("agents", requests=3000, seed=4)))
        trace[-1] = trace[-1]._replace(hashes=[2**64 - 1, *trace[-1].hashes[1:]])
        path = parquet(self.columns(trace), row_group_size=700)
        reader = TraceReader(path)
        assert list(reader) == trace
        assert reader.form is FORMATS["mooncake"]
        assert reader.name == "trace"
        import hashlib

        assert reader.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()
        run = CliRunner().invoke(app, ["trace", "convert", path, str(tmp_path / "t.jsonl.gz")])
        assert run.exit_code == 0, run.stderr
        assert read(str(tmp_path / "t.jsonl.gz")) == trace

    def test_bailian_columns(self, parquet: Callable[..., str]) -> None:
        trace = [Request(61_114, [1, 2], Lengths(30, 5))]
        path = parquet(self.columns(trace, timestamp=[61.114], chat_id=[159], type=["text"], turn=[1]))
        reader = TraceReader(path)
        assert list(reader) == trace
        assert reader.unit == "s"

    def test_what_pandas_makes_of_nulls(self, parquet: Callable[..., str]) -> None:
        """A column of whole numbers with a hole in it is one of floats."""
        trace = [Request(i, [1], Lengths(10, 5)) for i in range(3)]
        path = parquet(self.columns(trace, output_length=pa.array([5.0, None, 7.0])))
        assert [r.lengths.output for r in read(path)] == [5, None, 7]

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"hash_ids": ...}, ":1: field 'hash_ids' is missing"),
            ({"timestamp": [1, None, 3]}, ":2: timestamp is null, a JSON null"),
            (
                {"input_length": [10.0, float("nan"), 3.0]},
                ":2: input_length is nan; accepted: finite numbers",
            ),
            ({"timestamp": [0, 3, 2]}, ":3: timestamp 2 ms is before the row above it"),
            ({"timestamp": pa.array([0, 1, 2], pa.timestamp("ms"))}, ":1: timestamp is .*, a JSON datetime"),
            ({"input_length": [10, 10, 600]}, r":3: 1 hash ids for input_length 600"),
            ({"hash_ids": [["a"], ["b"], ["c"]]}, ':1: hash_ids holds "a", a JSON string'),
            ({"hash_ids": [[1], [-1], [1]]}, ":2: hash_ids holds -1"),
            ({"hash_ids": [[1], None, [1]]}, ":2: hash_ids is a JSON null"),
        ],
    )
    def test_errors_are_those_of_json_lines_with_row_numbers(
        self, changes: dict[str, Any], says: str, parquet: Callable[..., str]
    ) -> None:
        trace = [Request(i, [1], Lengths(10, 5)) for i in range(3)]
        path = parquet(self.columns(trace, **changes))
        with pytest.raises(TraceError, match=says) as raised:
            read(path)
        assert str(raised.value).startswith(f"{path}:")

    def test_a_fraction_names_both_readings(self, parquet: Callable[..., str]) -> None:
        trace = [Request(0, [1], Lengths(10, 5))] * 3
        path = parquet(self.columns(trace, timestamp=[0.5, 1.0, 100.5]))
        with pytest.raises(TraceError, match=r"spans 100 s .* if timestamps are seconds or 0.1 s"):
            read(path)
        assert [r.timestamp_ms for r in read(path, Options(unit="ms"))] == [0, 1, 100]

    def test_further_columns_are_ignored_with_one_notice_or_refused(
        self, parquet: Callable[..., str]
    ) -> None:
        trace = [Request(i, [1], Lengths(10, 5)) for i in range(3)]
        path = parquet(self.columns(trace, tools=[{"a": 1}] * 3))
        reader = TraceReader(path)
        assert list(reader) == trace
        assert reader.notices == [f"{path}: fields that change nothing here were ignored: tools"]
        with pytest.raises(TraceError, match=":1: unknown field 'tools'"):
            read(path, Options(strict=True))

    def test_azure_columns_are_refused_by_name(self, parquet: Callable[..., str]) -> None:
        path = parquet({"TIMESTAMP": [1], "ContextTokens": [3], "GeneratedTokens": [3]})
        with pytest.raises(
            TraceError, match="an Azure LLM inference trace: lengths only, no content identity"
        ):
            read(path, Options(skip_bad=1000))

    def test_files_that_are_none(
        self, parquet: Callable[..., str], write: Write, good_row: Row, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(TraceError, match="the content is not Parquet, the name says so"):
            read(write(good_row(), name="t.parquet"))
        path = parquet(self.columns([Request(i, [1], Lengths(10, 5)) for i in range(3)]))
        whole = Path(path).read_bytes()

        class Stdin:
            buffer = io.BytesIO(whole)

        monkeypatch.setattr("sys.stdin", Stdin)
        with pytest.raises(TraceError, match="a Parquet file, not by its name but as a stream"):
            read("-")
        for keep in (4, len(whole) // 2, len(whole) - 1):
            Path(path).write_bytes(whole[:keep])
            with pytest.raises(TraceError, match=r"parquet:1: the Parquet data is damaged or cut off"):
                read(path)

    def test_a_column_twice(self, tmp_path: Path) -> None:
        table = pa.Table.from_arrays([pa.array([1])] * 2, names=["timestamp", "timestamp"])
        pq.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(TraceError, match="column 'timestamp' appears twice"):
            read(str(tmp_path / "t.parquet"))


class TestTimed:
    def test_what_is_written_is_seconds_and_reads_back(self, tmp_path: Path) -> None:
        trace = list(generate(Synth("bursts", requests=100, seed=1, block_size=16)))
        path = str(tmp_path / "t.jsonl")
        assert writer.write(path, trace, TIMED) == 100
        assert read(path, Options(unit="s", block_size=16)) == trace
        first = json.loads(Path(path).read_text().splitlines()[0], parse_float=Decimal)
        assert first["timestamp"] * 1000 == trace[0].timestamp_ms

    def test_the_command_says_how_to_use_it(self, tmp_path: Path, write: Write, good_row: Row) -> None:
        source, target = write(good_row(timestamp=1500), name="s.jsonl"), str(tmp_path / "t.jsonl")
        run = CliRunner().invoke(app, ["trace", "convert", source, target, "--to", "timed"])
        assert run.exit_code == 0, run.stderr
        assert (
            f"note: {target}: vllm bench serve --dataset-name timed_trace --num-prompts 1"
            f" --timed-trace-chunk-hash-size 512 --dataset-path {target}\n"
        ) in run.stderr
        assert json.loads(Path(target).read_text())["timestamp"] == 1.5

    def test_it_needs_an_output_length(self, tmp_path: Path, write: Write, good_row: Row) -> None:
        source, target = write(good_row(), good_row(output_length=...), name="s.jsonl"), tmp_path / "t.jsonl"
        command = ["trace", "convert", source, str(target), "--to", "timed"]
        run = CliRunner().invoke(app, command)
        assert run.exit_code == 2
        assert run.stderr == (
            f"{target}:2: the request has no output_length, which timed rows need;"
            " accepted: traces that have them all, or --output-length N\n"
        )
        assert not target.exists()
        assert CliRunner().invoke(app, [*command, "--output-length", "7"]).exit_code == 0
        assert [json.loads(line)["output_length"] for line in target.read_text().splitlines()] == [5, 7]

    def test_vllm_does_not_unpack(self, tmp_path: Path, write: Write, good_row: Row) -> None:
        run = CliRunner().invoke(app, ["trace", "convert", write(good_row()), "t.jsonl.gz", "--to", "timed"])
        assert run.exit_code == 2
        assert "does not unpack" in run.stderr


def test_a_pipe_is_a_trace(tmp_path: Path, good_row: Row) -> None:
    """What a shell gives for <(zcat ...)."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = json.dumps(good_row()).encode() + b"\n"
    feeding = threading.Thread(target=lambda: pipe.write_bytes(2 * line))
    feeding.start()
    assert len(read(str(pipe))) == 2
    feeding.join()


def test_devices_are_refused() -> None:
    with pytest.raises(TraceError, match="is a device or a socket"):
        read("/dev/zero")


class TestObserved:
    """What the connector's recorder adds to a row."""

    SEEN = '{"looked_up_ms": 0.25, "loaded_blocks": 3, "landed_ms": 40, "first_token_ms": null, "newer": [1]}'

    def row(self, seen: str) -> bytes:
        rest = '"input_length": 1000, "output_length": 5, "hash_ids": [1, 2]'
        return f'{{"timestamp": 3, {rest}, "observed": {seen}}}'.encode()

    def test_it_is_read_and_what_is_not_known_of_it_is_left_alone(self, write: Write) -> None:
        reader = TraceReader(write(self.row(self.SEEN), self.row("null")))
        first, second = reader
        assert first.observed == Observed(looked_up_ms=0.25, loaded_blocks=3, landed_ms=40.0)
        assert second.observed is None
        assert reader.notices == []

    def test_it_survives_being_written_and_is_not_for_benchmarks(self, write: Write, tmp_path: Path) -> None:
        rows = read(write(self.row(self.SEEN)))
        for form, expected in ((FORMATS["mooncake"], rows[0].observed), (TIMED, None)):
            out = str(tmp_path / f"{form.name}.jsonl")
            writer.write(out, rows, form)
            (again,) = read(out, Options(unit=form.unit, block_size=512))
            assert again.observed == expected

    @pytest.mark.parametrize(
        ("seen", "says"),
        [
            ("[]", "observed is a JSON array; accepted: an object, as the recorder writes it"),
            ('{"landed_ms": -1}', "observed.landed_ms is -1; accepted: milliseconds from 0 to 2**53"),
            ('{"landed_ms": true}', "observed.landed_ms is true; accepted: milliseconds"),
            ('{"loaded_blocks": 1.5}', "observed.loaded_blocks is 1.5; accepted: a whole number from 0"),
        ],
    )
    def test_a_bad_one_is_one_sentence(self, write: Write, seen: str, says: str) -> None:
        with pytest.raises(TraceError) as raised:
            read(write(self.row("null"), self.row(seen)))
        assert f":2: {says}" in str(raised.value)
