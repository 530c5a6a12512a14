"""`singleflight gate`: the answers it must give, its files, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from singleflight.gate import decide, verdict
from singleflight.traces import recording

from .conftest import BLOCK, Write, bursts, call

WARM = ("--store", "warm", "--block-size", BLOCK)


def gated(tmp_path: Path, *arguments: object) -> verdict.Verdict:
    out = tmp_path / "v.json"
    result = call("gate", *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    return verdict.read(out)


def refused(tmp_path: Path, *arguments: object) -> str:
    """What is said, on one line; nothing is written."""
    before = sorted(tmp_path.iterdir())
    result = call("gate", *arguments, "--out", tmp_path / "v.json")
    assert result.exit_code == 2
    assert sorted(tmp_path.iterdir()) == before
    return " ".join(result.stderr.replace("│", " ").split())


class TestAnswers:
    def test_yes_for_bursts_over_a_slow_store(self, bursty: Path, slow: Path, tmp_path: Path) -> None:
        found = gated(tmp_path, bursty, "--calibration", slow, *WARM, "--model", "tiny")
        assert found.enable
        assert found.gain.mean.low > decide.LEAST_MEAN
        assert found.gain.p99.low > decide.LEAST_P99
        assert found.ttft["attach"].mean_s < found.ttft["stock"].mean_s
        # By hand: of a burst's 8 x 41 loads, 7 x 40 repeat one in flight. The last token is not loaded, and
        # so no last block.
        assert found.redundancy == pytest.approx(7 / 8, rel=0.02)
        assert found.scope.model == "tiny"
        assert found.scope.steady_requests == 14 * 8 - 14 * 8 // 10
        assert "single-flight pays." in found.reasons[0]

    def test_no_for_the_same_bursts_over_a_fast_store(self, bursty: Path, fast: Path, tmp_path: Path) -> None:
        found = gated(tmp_path, bursty, "--calibration", fast, *WARM)
        assert not found.enable
        assert "does not pay, since the mean must gain 5 % in all of it" in found.reasons[0]
        (flip,) = found.flips
        assert flip.startswith("A load path ")
        assert "times as slow" in flip

    def test_no_where_nothing_is_shared(self, write: Write, slow: Path, tmp_path: Path) -> None:
        alone = [(100 * i, [10 * i + j for j in range(8)]) for i in range(120)]
        found = gated(tmp_path, write(alone), "--calibration", slow, *WARM)
        assert not found.enable
        assert found.redundancy == 0
        assert found.ttft["stock"].gets == found.ttft["attach"].gets
        assert found.flips == ["Requests that load the same blocks at the same time: there are none."]

    def test_what_the_traffic_has_not_put_there_is_not_loaded(
        self, bursty: Path, slow: Path, tmp_path: Path
    ) -> None:
        found = gated(tmp_path, bursty, "--calibration", slow, "--block-size", BLOCK)
        assert not found.enable
        assert found.ttft["stock"].gets == 0
        assert "Nothing is loaded" in " ".join(found.reasons)

    def test_more_than_an_instance_admits_is_a_no_with_that_reason_first(
        self, write: Write, slow: Path, tmp_path: Path
    ) -> None:
        """Arrival is not admission: a batch that is handed over at once is no burst of arrivals."""
        batch = [(0, [*range(20), 100 + i]) for i in range(300)]
        found = gated(tmp_path, write(batch), "--calibration", slow, *WARM, "--max-num-seqs", 8)
        assert not found.enable
        assert "more than max_num_seqs (8) wait for their first token when they arrive" in found.reasons[0]
        assert "a batch handed over at once, or an overload" in found.reasons[0]

    def test_a_trace_run_faster_waits_longer(self, bursty: Path, slow: Path, tmp_path: Path) -> None:
        as_it_is, faster = (
            gated(tmp_path, bursty, "--calibration", slow, *WARM, "--scale", scale).ttft["stock"].mean_s
            for scale in (1, 20)
        )
        assert faster > 1.5 * as_it_is


class TestRefusals:
    def test_too_few_requests(self, write: Write, tmp_path: Path) -> None:
        """24 rows over a minute once made a yes that a server would obey for a month."""
        trace = write([(2500 * i, [1, 2, i + 3]) for i in range(24)])
        assert refused(tmp_path, trace, *WARM).endswith(
            f" {trace}: 22 requests after the warm-up, which is the first tenth of them; accepted: at least"
            " 100, since of fewer the 99th percentile is a single request"
        )

    def test_one_row_of_another_day_is_said_to_be_there(self, write: Write, tmp_path: Path) -> None:
        """It once made the steady phase that row alone, and a yes a silent no."""
        rows = [*bursts(), (11 * 3_600_000, [1])]
        trace = write(rows)
        said = refused(tmp_path, trace, *WARM)
        assert (
            f"{trace}: no request for 39,574 s of the 39,600 s, after request 112 of 113 (timestamp"
            " 26007 ms); accepted: a trace without a gap of more than half its span, so cut it there"
        ) in said

    def test_a_verdict_that_is_there_stays(self, bursty: Path, write: Write, tmp_path: Path) -> None:
        out = tmp_path / "v.json"
        out.write_text("the old one")
        assert call("gate", write([(0, [1])]), *WARM, "--out", out).exit_code == 2
        assert out.read_text() == "the old one"


class TestFiles:
    def test_verdict_and_plot_and_nothing_else(self, bursty: Path, slow: Path, tmp_path: Path) -> None:
        out = tmp_path / "v.json"
        asked = ("--calibration", slow, *WARM, "--instances", 2, "--capacity", 500, "--routing", "affinity")
        result = call("gate", bursty, *asked, "--out", out, "--json")
        assert result.exit_code == 0, result.output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v.json", "v.png"]
        assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads(result.stdout) == json.loads(out.read_text())
        scope = verdict.read(out).scope
        (trace,) = scope.traces
        assert trace.sha256 == hashlib.sha256(bursty.read_bytes()).hexdigest()
        assert (trace.name, trace.requests, trace.steady_requests) == ("bursty", 112, 101)
        assert (scope.instances, scope.routing, scope.capacity_blocks) == (2, "affinity", 500)
        assert scope.model is None

    def test_people_see_both_distributions_and_the_figures(
        self, bursty: Path, slow: Path, tmp_path: Path
    ) -> None:
        result = call("gate", bursty, "--calibration", slow, *WARM, "--out", tmp_path / "v.json")
        for what in (
            "yes, coalesce",
            "101 requests after the warm-up",
            "TTFT median",
            "TTFT p99",
            "TTFT mean",
            "single-flight (attach)",
            "park mode",
            "gain of the mean: +",
            "What would flip it:",
            "load_bandwidth",
        ):
            assert what in result.stdout
        assert f"Written: {tmp_path / 'v.json'}, {tmp_path / 'v.png'}" in result.stdout

    def test_interrupted_it_leaves_nothing(
        self, bursty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(decide, "simulate", interrupted)
        result = call("gate", bursty, *WARM, "--out", tmp_path / "v.json")
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, "interrupted; nothing was written")
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_not_there_is_one_sentence(self, bursty: Path, tmp_path: Path) -> None:
        result = call("gate", bursty, *WARM, "--out", tmp_path / "no" / "v.json")
        assert result.exit_code == 1
        assert "No such file or directory" in result.stderr


def header(trace: Path, **changes: Any) -> Path:
    """The header that the recorder writes beside a trace."""
    path = recording.header_path(str(trace))
    path.write_text(
        json.dumps(
            {
                "schema": recording.SCHEMA,
                "block_size_tokens": BLOCK,
                "model": "tiny",
                "load_windows_ms": {"count": 12, "p50": 80.5, "p99": 200},
                "whatever_else": "the recorder says",
                **changes,
            }
        )
    )
    return path


class TestRecordings:
    @pytest.fixture
    def trace(self, write: Write) -> Path:
        return write([(100 * i, [i, i + 1]) for i in range(120)])

    def test_the_deployment_comes_from_its_header(self, trace: Path, tmp_path: Path) -> None:
        header(
            trace,
            mode="shadow",
            max_num_seqs=7,
            max_num_batched_tokens=512,
            receive_threads=3,
            capacity_blocks=99,
            kv_bytes_per_token=2048.0,
        )
        found = gated(tmp_path, trace)
        scope = found.scope
        assert (scope.block_size_tokens, scope.model) == (BLOCK, "tiny")
        assert (scope.max_num_seqs, scope.max_num_batched_tokens) == (7, 512)
        assert (scope.receive_threads, scope.capacity_blocks) == (3, 99)
        figure = found.figures["kv_bytes_per_token"]
        assert (figure.value, figure.origin.value) == (2048, "measured")
        asked = gated(tmp_path, trace, "--threads", 1, "--max-num-seqs", 9, "--capacity", 50).scope
        assert (asked.receive_threads, asked.max_num_seqs, asked.capacity_blocks) == (1, 9, 50)

    def test_a_yes_says_that_the_recorded_server_could_not_obey_it(
        self, bursty: Path, slow: Path, tmp_path: Path
    ) -> None:
        trace = tmp_path / "bursty.jsonl"  # other tests have `bursty` without a header
        trace.write_bytes(bursty.read_bytes())
        header(trace, attach_refused="the moon is full")
        found = gated(tmp_path, trace, "--calibration", slow, *WARM)
        assert found.enable
        assert found.reasons[0] == (
            "It pays, but the server that was recorded could not obey a yes: attach mode would pass through"
            " there, since the moon is full."
        )
        header(trace)
        without = gated(tmp_path, trace, "--calibration", slow, *WARM)
        assert without.reasons == found.reasons[1:]

    def test_one_by_an_earlier_version_is_a_trace_with_a_block_size_and_a_model(
        self, trace: Path, tmp_path: Path
    ) -> None:
        header(trace)
        scope = gated(tmp_path, trace).scope
        assert (scope.block_size_tokens, scope.model, scope.capacity_blocks) == (BLOCK, "tiny", 100_000)

    def test_model_overrules_it_with_a_notice(self, trace: Path, tmp_path: Path) -> None:
        where = header(trace)
        result = call("gate", trace, "--model", "/models/huge", "--out", tmp_path / "v.json")
        assert result.exit_code == 0
        assert f"note: {where} says the model tiny; the verdict is for --model /models/huge" in result.stderr
        assert verdict.read(tmp_path / "v.json").scope.model == "/models/huge"

    def test_one_made_with_the_hub_offline_is_for_the_models_name(self, trace: Path, tmp_path: Path) -> None:
        folder = "/cache/hub/models--org--tiny/snapshots/9f2c"
        header(trace, model=folder)
        assert gated(tmp_path, trace).scope.model == "org/tiny"
        result = call("gate", trace, "--model", "org/tiny", "--out", tmp_path / "v.json")
        assert "says the model" not in result.stderr

    def test_of_several_each_is_an_instance(self, write: Write, slow: Path, tmp_path: Path) -> None:
        """Data parallel: each rank records its own arrivals."""
        ranks = [write(bursts(), f"trace.jsonl.dp{rank}") for rank in range(2)]
        for rank in ranks:
            header(rank)
        asked = ("--calibration", slow, "--store", "warm")
        one, both = gated(tmp_path, ranks[0], *asked), gated(tmp_path, *ranks, *asked)
        assert both.scope.instances == len(both.scope.traces) == 2
        assert both.scope.steady_requests == 2 * one.scope.steady_requests
        assert both.ttft["stock"].gets == 2 * one.ttft["stock"].gets
        assert both.ttft["attach"].mean_s == pytest.approx(one.ttft["attach"].mean_s)

    def test_several_that_are_not_of_one_deployment(self, write: Write, tmp_path: Path) -> None:
        first, second = (write([(100 * i, [i]) for i in range(120)], name) for name in ("a", "b"))
        headers = [header(first), header(second, model="huge")]
        assert refused(tmp_path, first, second).endswith(
            f"{headers[1]}: the model huge; accepted: tiny, as {headers[0]} says, or --model for both"
        )
        header(second, block_size_tokens=64)
        rows = second.read_text().replace('"input_length": 32', '"input_length": 64')
        second.write_text(rows)
        assert f"{second}: blocks of 64 tokens; accepted: 32, as {first} has" in refused(
            tmp_path, first, second
        )
        assert "2 instances with 2 traces; accepted: 1" in refused(
            tmp_path, first, write([(100 * i, [i]) for i in range(120)], "c"), "--instances", 2, *WARM
        )
        assert "a trace is there twice; accepted: each once" in refused(tmp_path, first, first)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"schema": "x"}, 'header.json: schema: "x" is not accepted'),
            ({"block_size_tokens": 0}, "block_size_tokens: 0 is not accepted; give a whole number"),
            ({"load_windows_ms": {"p50": -1}}, "load_windows_ms.p50: -1 is not accepted"),
            ({"max_num_seqs": 0}, "max_num_seqs: 0 is not accepted; give a whole number"),
        ],
    )
    def test_a_bad_header_is_one_sentence(
        self, trace: Path, changes: dict[str, Any], says: str, tmp_path: Path
    ) -> None:
        header(trace, **changes)
        assert says in refused(tmp_path, trace)


class TestBadInput:
    @pytest.mark.parametrize(
        ("option", "value", "says"),
        [
            ("--scale", 0, "--scale 0; accepted"),
            ("--scale", "nan", "--scale nan; accepted"),
            ("--block-bytes", -1, "--block-bytes -1; accepted"),
            ("--block-bytes", 10, "kv_bytes_per_token.value: 0.3125 is not accepted"),
            ("--instances", 0, "instances 0; accepted"),
            ("--capacity", 0, "gpu_blocks 0; accepted"),
            ("--threads", 0, "receive_threads 0; accepted"),
            ("--max-num-seqs", 5000, "max_num_batched_tokens 2048; accepted: max_num_seqs (5000) to"),
            ("--store", "full", "store 'full'; accepted: computed, warm"),
            ("--routing", "random", "routing 'random'; accepted: round_robin, affinity"),
            ("--calibration", "no.json", "no.json: No such file or directory; give a file"),
        ],
    )
    def test_a_value_out_of_range(
        self, bursty: Path, option: str, value: object, says: str, tmp_path: Path
    ) -> None:
        assert says in refused(tmp_path, bursty, "--block-size", BLOCK, option, value)

    def test_a_picture_that_would_take_the_verdicts_place(self, bursty: Path, tmp_path: Path) -> None:
        result = call("gate", bursty, "--out", tmp_path / "v.png")
        assert result.exit_code == 2
        assert "accepted: another ending" in " ".join(result.stderr.replace("│", " ").split())

    def test_a_request_that_no_instance_has_room_for(self, bursty: Path, tmp_path: Path) -> None:
        assert refused(tmp_path, bursty, *WARM, "--capacity", 20).endswith(
            f"{bursty}: request 1 of 112 needs 41 blocks of KV cache; accepted: up to the 20 of --capacity"
        )

    def test_a_bad_line_of_any_trace(self, bursty: Path, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_text("{\n")
        said = refused(tmp_path, bursty, tmp_path / "t.jsonl", "--block-size", BLOCK)
        assert f"{tmp_path / 't.jsonl'}:1: malformed JSON" in said

    def test_a_calibration_of_an_earlier_version(self, bursty: Path, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text('{"schema": "kv-singleflight/calibration/1", "figures": {}}')
        assert refused(tmp_path, bursty, "--calibration", path) == (
            f'{path}: schema: "kv-singleflight/calibration/1" is of another version; run `singleflight'
            " calibrate` again"
        )

    def test_registering_imports_nothing_heavy(self) -> None:
        code = (
            "import sys, typer; from singleflight.cli.gate import register; register(typer.Typer())\n"
            "heavy = {'numba', 'numpy', 'pyarrow', 'joblib', 'matplotlib', 'vllm'}\n"
            "print(sorted(heavy & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "[]"
