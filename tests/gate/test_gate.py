"""`singleflight gate`: the answers it must give, its files, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from singleflight import calibration, recording, verdict
from singleflight.gate_commands import register as register_gate
from singleflight.sim.commands import register as register_sim

app = typer.Typer()
register_sim(app)
register_gate(app)

SLOW_STORE = {
    # As in the demo: a link of 50 MB/s, a tiny model with 2 KiB of KV a token.
    "load_bandwidth": {"value": 50e6, "unit": "bytes/s", "origin": "given"},
    "kv_bytes_per_token": {"value": 2048, "unit": "bytes/token", "origin": "given"},
}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "300"})


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent burst: 16 children within 50 ms over a plan none has seen."""
    path = tmp_path_factory.mktemp("trace") / "agents.jsonl"
    pattern = ("--pattern", "agents", "--fan-in", 16, "--requests", 1000, "--rate", 0.05)
    assert call("trace", "synth", path, *pattern).exit_code == 0
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"schema": calibration.SCHEMA, "figures": SLOW_STORE}))
    return path


class TestAnswers:
    @pytest.mark.parametrize("name", ["conversation", "synthetic"])
    @pytest.mark.parametrize("deployment", [(1, "round_robin"), (4, "affinity")])
    def test_no_for_the_public_traces_at_100_ms(
        self, shared: Path, name: str, deployment: tuple[int, str], tmp_path: Path
    ) -> None:
        trace, (instances, routing) = shared / "traces" / f"{name}_trace.jsonl", deployment
        out = tmp_path / "v.json"
        result = call(
            "gate", trace, "--window-ms", 100, "--instances", instances, "--routing", routing, "--out", out
        )
        assert result.exit_code == 0, result.stderr
        found = verdict.read(out)
        assert not found.enable
        assert found.margin.high < 0
        assert found.fractions.removable_attempts < 0.0002  # the published maximum is 0.016862 %

    def test_yes_for_an_agent_burst_over_a_slow_store(self, agents: Path, slow: Path, tmp_path: Path) -> None:
        out = tmp_path / "v.json"
        result = call("gate", agents, "--calibration", slow, "--out", out, "--model", "tiny")
        assert result.exit_code == 0, result.stderr
        found = verdict.read(out)
        assert found.enable
        assert found.margin.low > 0
        # By hand: 15 of 16 children need not load the 8 plan blocks; parent 16, first child 24, 15 x 24.
        assert found.fractions.removable_attempts == pytest.approx(15 * 8 / (16 + 16 * 24), rel=0.05)
        assert found.scope.model == "tiny"

    def test_no_for_the_same_burst_over_a_fast_store(self, agents: Path, tmp_path: Path) -> None:
        out = tmp_path / "v.json"
        assert call("gate", agents, "--window-ms", 1, "--out", out).exit_code == 0
        assert not verdict.read(out).enable

    def test_no_where_nothing_is_shared(self, slow: Path, tmp_path: Path) -> None:
        trace, out = tmp_path / "t.jsonl", tmp_path / "v.json"
        assert call("trace", "synth", trace, "--pattern", "poisson").exit_code == 0
        assert call("gate", trace, "--calibration", slow, "--out", out).exit_code == 0
        found = verdict.read(out)
        assert not found.enable
        assert found.rates.saving_s_per_s == 0
        assert "there is nothing to save" in " ".join(found.flips)

    def test_the_window_that_flips_it_flips_it(self, agents: Path, tmp_path: Path) -> None:
        out = tmp_path / "v.json"
        assert call("gate", agents, "--window-ms", 1, "--out", out).exit_code == 0
        (said,) = [flip for flip in verdict.read(out).flips if "W_eff" in flip]
        at = int(said.split()[2])
        assert said.startswith(f"Loads of {at} ms (W_eff {at} ms of trace time) and longer")
        answers = []
        for window_ms in (0.97 * at, 1.03 * at):
            assert call("gate", agents, "--window-ms", window_ms, "--out", out).exit_code == 0
            answers.append(verdict.read(out).enable)
        assert answers == [False, True]

    def test_a_margin_on_both_sides_is_a_no(self, agents: Path, tmp_path: Path) -> None:
        """Half a window on either side of the threshold: it would pay as stated, and not all around."""
        out = tmp_path / "v.json"
        assert call("gate", agents, "--window-ms", 60, "--out", out).exit_code == 0
        found = verdict.read(out)
        assert found.margin.low < 0 < found.margin.stated < found.margin.high
        assert not found.enable
        assert "pays in some of it only, so the answer is no" in " ".join(found.reasons)

    def test_reuse_that_rests_on_a_coarse_clock_is_a_no(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        """Sixteen at the same second: at once, or over the whole of it? Only a recording of ours knows."""
        rows = [(second * 1000, [second, 1000 + second]) for second in range(60) for _ in range(16)]
        trace, out = write(rows), tmp_path / "v.json"
        asked = ("gate", trace, "--window-ms", 40, "--block-size", 32, "--out", out)
        assert call(*asked).exit_code == 0
        found = verdict.read(out)
        assert found.margin.low < 0 < found.margin.high
        assert not found.enable
        header = {"schema": recording.SCHEMA, "block_size_tokens": 32, "model": "m", "load_windows_ms": None}
        recording.header_path(str(trace)).write_text(json.dumps(header))
        assert call(*asked).exit_code == 0
        assert verdict.read(out).enable

    def test_a_trace_run_faster_is_a_longer_window_and_more_a_second(
        self, agents: Path, tmp_path: Path
    ) -> None:
        found = []
        for window_ms, scale in ((200, 1), (100, 2)):
            out = tmp_path / "v.json"
            assert (
                call("gate", agents, "--window-ms", window_ms, "--scale", scale, "--out", out).exit_code == 0
            )
            found.append(verdict.read(out))
        assert found[0].fractions == found[1].fractions
        assert found[0].scope.w_eff_ms == found[1].scope.w_eff_ms == 200
        assert found[1].rates.requests_per_s == pytest.approx(2 * found[0].rates.requests_per_s)


class TestFiles:
    def test_verdict_and_plot_and_nothing_else(self, agents: Path, slow: Path, tmp_path: Path) -> None:
        out = tmp_path / "out" / "v.json"
        out.parent.mkdir()
        result = call("gate", agents, "--calibration", slow, "--out", out)
        assert sorted(path.name for path in out.parent.iterdir()) == ["v.json", "v.png"]
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert "agents, 1 x 100,000 blocks of 512 tokens" in result.stdout
        assert "yes, coalesce" in result.stdout
        assert "What would flip it" in result.stdout
        scope = verdict.read(out).scope
        assert scope.trace_sha256 == hashlib.sha256(agents.read_bytes()).hexdigest()
        assert (scope.requests, scope.block_size_tokens) == (1000, 512)

    def test_json_is_the_verdict_and_nothing_else(self, agents: Path, tmp_path: Path) -> None:
        out = tmp_path / "v.json"
        result = call("gate", agents, "--window-ms", 100, "--out", out, "--json")
        assert result.stdout == out.read_text()
        assert json.loads(result.stdout)["figures"]["window"] == {
            "value": 100.0,
            "unit": "ms",
            "origin": "given",
        }

    def test_a_folder_that_is_not_there(self, agents: Path, tmp_path: Path) -> None:
        result = call("gate", agents, "--window-ms", 100, "--out", tmp_path / "no" / "v.json")
        assert result.exit_code == 1
        assert "No such file or directory" in result.stderr


class TestRecording:
    """The header that the recorder writes beside a trace."""

    def header(self, trace: Path, **changes: Any) -> Path:
        path = recording.header_path(str(trace))
        path.write_text(
            json.dumps(
                {
                    "schema": recording.SCHEMA,
                    "block_size_tokens": 32,
                    "model": "tiny",
                    "load_windows_ms": {"count": 12, "p50": 80.5, "p99": 200},
                    "whatever_else": "the recorder says",
                    **changes,
                }
            )
        )
        return path

    @pytest.fixture
    def trace(self, write: Callable[..., Path]) -> Path:
        return write([(100 * i, [i, i + 1]) for i in range(50)])

    def test_block_size_model_and_window_come_from_it(self, trace: Path, tmp_path: Path) -> None:
        self.header(trace)
        out = tmp_path / "v.json"
        result = call("gate", trace, "--out", out)
        assert result.exit_code == 0, result.stderr
        found = verdict.read(out)
        assert (found.scope.block_size_tokens, found.scope.model) == (32, "tiny")
        assert found.scope.window_ms == 80.5
        assert found.figures["window"].origin.value == "measured"

    def test_without_observed_loads_the_window_is_the_cost_models(self, trace: Path, tmp_path: Path) -> None:
        self.header(trace, load_windows_ms=None)
        out = tmp_path / "v.json"
        assert call("gate", trace, "--out", out).exit_code == 0
        assert verdict.read(out).figures["window"].origin.value == "default"

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"schema": "x"}, 'header.json: schema: "x" is not accepted'),
            ({"block_size_tokens": 0}, "block_size_tokens: 0 is not accepted; give a whole number"),
            ({"load_windows_ms": {"p50": -1}}, "load_windows_ms.p50: -1 is not accepted"),
        ],
    )
    def test_a_bad_one_is_one_sentence(
        self, trace: Path, changes: dict[str, Any], says: str, tmp_path: Path
    ) -> None:
        self.header(trace, **changes)
        result = call("gate", trace, "--out", tmp_path / "v.json")
        assert result.exit_code == 2
        assert says in result.stderr
        assert result.stderr.count("\n") == 1

    def test_another_model_than_recorded_is_refused(self, trace: Path, tmp_path: Path) -> None:
        self.header(trace)
        result = call("gate", trace, "--model", "huge", "--out", tmp_path / "v.json")
        assert result.exit_code == 2
        assert "--model huge; accepted: tiny" in result.stderr


class TestBadInput:
    @pytest.mark.parametrize(
        ("option", "value", "says"),
        [
            ("--window-ms", 0, "--window-ms 0; accepted"),
            ("--window-ms", "nan", "--window-ms nan; accepted"),
            ("--scale", 0, "--scale 0; accepted"),
            ("--block-bytes", -1, "--block-bytes -1; accepted"),
            ("--block-bytes", 100, "kv_bytes_per_token.value: 0.195312 is not accepted"),
            ("--out", "v.png", "--out v.png; accepted: another ending"),
            ("--instances", 0, "instances 0; accepted"),
            ("--capacity", 0, "capacity 0; accepted"),
            ("--routing", "random", "routing 'random'; accepted: round_robin, affinity"),
            ("--calibration", "no.json", "no.json: No such file or directory; give a file"),
        ],
    )
    def test_a_value_out_of_range(
        self, agents: Path, option: str, value: object, says: str, tmp_path: Path
    ) -> None:
        result = call("gate", agents, "--out", tmp_path / "v.json", option, value)
        assert result.exit_code == 2
        assert says in " ".join(result.stderr.replace("│", " ").split())
        assert list(tmp_path.iterdir()) == []

    def test_a_bad_line_of_the_trace(self, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_text("{\n")
        result = call("gate", tmp_path / "t.jsonl", "--out", tmp_path / "v.json")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"{tmp_path / 't.jsonl'}:1: malformed JSON")

    def test_a_trace_that_spans_no_time(self, write: Callable[..., Path], tmp_path: Path) -> None:
        result = call("gate", write([(5, [1]), (5, [2])]), "--out", tmp_path / "v.json")
        assert result.exit_code == 2
        assert "all requests within 0 ms; accepted: a trace that spans some time" in result.stderr

    def test_registering_imports_nothing_heavy(self) -> None:
        code = (
            "import sys, typer; from singleflight.gate_commands import register; register(typer.Typer())\n"
            "heavy = {'numba', 'numpy', 'pyarrow', 'joblib', 'matplotlib', 'vllm'}\n"
            "print(sorted(heavy & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "[]"
