"""The commands as a user meets them: output shapes, exit codes, and nothing left behind."""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from singleflight.cli.simulate import register
from singleflight.sweep import output
from singleflight.sweep.tables import TABLES

RUN = (
    "import typer; from singleflight.cli.simulate import register; app = typer.Typer(); register(app); app()"
)
GRID = ("--window-ms", "60,2000", "--instances", "1,2", "--capacity", "100")

app = typer.Typer()
register(app)


def call(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], **options)


def process(*arguments: object, code: str = RUN, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "bursts.jsonl.gz"
    assert call("trace", "synth", path, "--pattern", "bursts", "--requests", 300).exit_code == 0
    return path


class TestSimulate:
    def test_json(self, trace: Path) -> None:
        result = call("simulate", trace, "--window-ms", 60, "--instances", 3, "--warmup", "1/4", "--json")
        document = json.loads(result.stdout)
        assert list(document) == ["config", "warmup", "steady", "instances"]
        assert document["config"] == {
            "w_eff_ms": 60,
            "instances": 3,
            "capacity": 100_000,
            "routing": "round_robin",
            "lookup": "contiguous_prefix",
            "warmup": [1, 4],
        }
        names = (
            "requests lookups hits attempts removable cohorts dup_cohorts dup_attempts max_fanin p99_fanin"
        )
        for phase in ("warmup", "steady"):
            assert set(names.split()) | {"fanin_hist"} <= set(document[phase])
            hist = document[phase]["fanin_hist"]
            assert sum(hist.values()) == document[phase]["cohorts"]
            assert max(map(int, hist)) == document[phase]["max_fanin"]
            assert (
                sum(each[phase]["requests"] for each in document["instances"]) == document[phase]["requests"]
            )
        assert document["warmup"]["requests"] + document["steady"]["requests"] == 300

    def test_how_the_trace_was_read_is_said(self, trace: Path) -> None:
        result = call("simulate", trace, "--window-ms", 60, "--json")
        assert result.stderr == f"{trace}: mooncake, timestamps in ms, 512-token blocks\n"

    def test_table(self, trace: Path) -> None:
        result = call("simulate", trace, "--window-ms", 60)
        assert result.exit_code == 0
        assert "redundancy" in result.stdout

    def test_standard_input(self, trace: Path) -> None:
        from_file = call("simulate", trace, "--window-ms", 60, "--json")
        from_pipe = call("simulate", "-", "--window-ms", 60, "--json", input=trace.read_bytes())
        assert from_pipe.stdout == from_file.stdout

    @pytest.mark.parametrize(
        ("option", "value", "said"),
        [
            ("--window-ms", 0, "window 0; accepted"),
            ("--window-ms", 2**54, "accepted"),
            ("--instances", 0, "instances 0; accepted"),
            ("--capacity", -1, "capacity -1; accepted"),
            ("--capacity", 2**31, "accepted"),
            ("--routing", "random", "routing 'random'; accepted: round_robin, affinity"),
            ("--lookup", "x", "contiguous_prefix, independent_blocks"),
            ("--warmup", "2/1", "warmup 2/1; accepted"),
            ("--warmup", "1/0", "accepted"),
            ("--warmup", "tenth", "NUM/DEN"),
            ("--unit", "us", "accepted: ms, s"),
            ("--format", "csv", "accepted: auto, mooncake, qwen-bailian"),
            ("--block-size", 0, "accepted"),
            ("--skip-bad", -1, "accepted"),
        ],
    )
    def test_a_value_out_of_range(self, trace: Path, option: str, value: object, said: str) -> None:
        result = call("simulate", trace, "--window-ms", 60, option, value, env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.replace("│", " ").split())

    def test_bad_input_is_one_line_and_exit_2(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n{"timest')
        result = call("simulate", bad, "--window-ms", 60)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"{bad}:2: malformed JSON")
        assert result.stderr.count("\n") == 1


class TestSweep:
    def test_result_folder(self, trace: Path, tmp_path: Path) -> None:
        out = tmp_path / "deep" / "out"
        result = call("sweep", trace, "--out", out, *GRID)
        assert result.exit_code == 0, result.output
        manifest = json.loads((out / "manifest.json").read_text())
        files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        assert files == {*manifest["outputs"], "manifest.json"}
        for name, digest in manifest["outputs"].items():
            assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
        given = manifest["inputs"]["bursts"]
        assert given["sha256"] == hashlib.sha256(trace.read_bytes()).hexdigest()
        assert (given["format"], given["unit"], given["block_size"], given["requests"]) == (
            "mooncake",
            "ms",
            512,
            300,
        )
        assert {"python", "kv-singleflight", "numba", "numpy", "pyarrow"} <= set(manifest["versions"])
        assert manifest["command"]
        for table, columns in TABLES.items():
            parquet = pq.read_table(out / "bursts" / f"{table}.parquet")
            assert parquet.column_names == list(columns)
            lines = (out / "bursts" / f"{table}.csv").read_text().splitlines()
            assert lines[0] == ",".join(columns)
            assert lines[1:] == [",".join(map(str, row.values())) for row in parquet.to_pylist()]
        for plot in ("redundancy.png", "bursts/redundancy.png", "bursts/fanin.png", "bursts/reuse_gaps.png"):
            assert (out / plot).read_bytes().startswith(b"\x89PNG")

    def test_json(self, trace: Path, tmp_path: Path) -> None:
        result = call("sweep", trace, "--out", tmp_path / "out", *GRID, "--json")
        document = json.loads(result.stdout)
        assert [row["w_eff_ms"] for row in document["traces"]["bursts"]["windows"]] == [60, 2000]
        assert document["traces"]["bursts"]["gaps"]["lookups"] > 0

    def test_one_axis_value_leaves_nothing_to_compare(self, trace: Path, tmp_path: Path) -> None:
        axes = ("--routing", "affinity", "--lookup", "independent_blocks", "--json", "--jobs", "1")
        document = json.loads(call("sweep", trace, "--out", tmp_path / "out", *GRID, *axes).stdout)
        found = document["traces"]["bursts"]
        assert found["max_lookup_difference"] is None
        assert found["affinity_vs_round_robin"] is None

    def test_cohorts_and_what_an_earlier_sweep_left(self, trace: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert call("sweep", trace, "--out", out, *GRID, "--cohorts").exit_code == 0
        rows = sum(pq.read_metadata(file).num_rows for file in (out / "bursts" / "cohorts").glob("*.parquet"))
        phases = pq.read_table(out / "bursts" / "phase_rows.parquet")
        assert rows == sum(phases["cohorts"].to_pylist())
        (out / "notes.txt").write_text("mine")
        assert call("sweep", trace, "--out", out, *GRID).exit_code == 0
        # Gone: cohorts that the new manifest does not speak of. Still there: what is not ours.
        assert not (out / "bursts" / "cohorts").exists()
        assert (out / "notes.txt").read_text() == "mine"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--window-ms", "10,x"), "accepted: whole numbers"),
            (("--window-ms", "10,10"), "each once"),
            (("--window-ms", ""), "accepted: whole numbers"),
            (("--routing", "affinty"), "accepted: round_robin, affinity"),
            (("--capacity", "0"), "capacity 0; accepted"),
            (("--jobs", "0"), "accepted: -1, or 1 and more"),
            (("--backend", "spark"), "accepted: loky, dask, ray"),
            (("--backend", "dask"), "needs --address"),
            (("--address", "tcp://127.0.0.1:1"), "goes with --backend"),
        ],
    )
    def test_bad_options(self, trace: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
        result = call("sweep", trace, "--out", tmp_path / "new" / "out", *arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.replace("│", " ").split())
        assert list(tmp_path.iterdir()) == []

    def test_bad_input_leaves_nothing(self, trace: Path, tmp_path: Path) -> None:
        bad = tmp_path / "bad.jsonl"
        bad.write_text("{}\n")
        result = call("sweep", trace, bad, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"{bad}:1: field 'timestamp' is missing; accepted: ")
        assert list(tmp_path.iterdir()) == [bad]

    def test_two_traces_of_one_name(self, trace: Path, tmp_path: Path) -> None:
        result = call("sweep", trace, trace, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert "two traces are called bursts" in " ".join(result.stderr.replace("│", " ").split())

    def test_out_is_a_file(self, trace: Path) -> None:
        assert call("sweep", trace, "--out", trace).exit_code == 2

    def test_ctrl_c_keeps_what_is_finished(self, tmp_path: Path) -> None:
        trace, out = tmp_path / "big.jsonl", tmp_path / "out"
        assert call("trace", "synth", trace, "--requests", 20_000, "--own-blocks", 40).exit_code == 0
        axes = ("--capacity", "10000", "--jobs", "2")
        command = [sys.executable, "-c", RUN, "sweep", str(trace), "--out", str(out), *axes]
        # A session of its own: the signal goes to every process in it, as from a terminal.
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.monotonic() + 60
        while not list(out.glob(f"{output.PARTS}/*.json")):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=30)
        assert running.returncode == 130, said
        assert f"finished parts are in {out / output.PARTS}" in said
        assert "Traceback" not in said, said
        kept = list((out / output.PARTS).iterdir())
        assert kept
        assert [path for path in out.rglob("*") if path.is_file() and path not in kept] == []
        assert all(path.suffix == ".json" for path in kept)
        # joblib's resource tracker ends by itself, a moment after its parent.
        deadline = time.monotonic() + 10
        while _alive(running.pid):
            assert time.monotonic() < deadline, _alive(running.pid)
            time.sleep(0.05)
        resumed = process("sweep", trace, "--out", out, *axes)
        assert resumed.returncode == 0, resumed.stderr
        assert not (out / output.PARTS).exists()
        fresh = process("sweep", trace, "--out", tmp_path / "fresh", *axes)
        assert fresh.returncode == 0, fresh.stderr
        tables = [path / "big" / "phase_rows.csv" for path in (out, tmp_path / "fresh")]
        assert tables[0].read_bytes() == tables[1].read_bytes()

    def test_as_a_background_job_of_a_script_it_does_not_see_ctrl_c(
        self, trace: Path, tmp_path: Path
    ) -> None:
        """`singleflight sweep … &` in a script: the shell has SIGINT ignored. Its results are complete."""
        out = tmp_path / "out"
        press = (
            "import os, signal; from singleflight.sweep import work\n"
            "def run(*arguments):\n"
            "    os.kill(os.getppid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\n"
            "    return whole(*arguments)\n"
            "whole, work.run = work.run, run\n"
        )
        argv = [sys.executable, "-c", press + RUN, "sweep", str(trace), "--out", str(out), *GRID]
        script = f'trap "" INT; {shlex.join([*argv, "--jobs", "2"])}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        fresh = process("sweep", trace, "--out", tmp_path / "fresh", *GRID)
        assert fresh.returncode == 0, fresh.stderr
        tables = [path / "bursts" / "phase_rows.csv" for path in (out, tmp_path / "fresh")]
        assert tables[0].read_bytes() == tables[1].read_bytes()

    def test_a_killed_worker_keeps_what_is_finished(self, trace: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        die = (
            "import os; from singleflight.sweep import work\n"
            "def run(task, columns, cohorts=None):\n"
            "    if task.configs[0].instances == 2: os.kill(os.getpid(), 9)\n"
            "    return whole(task, columns, cohorts)\n"
            "whole, work.run = work.run, run\n"
        )
        arguments = ("sweep", trace, "--out", out, *GRID, "--jobs", "2")
        done = process(*arguments, code=die + RUN)
        assert done.returncode == 1, done.stderr
        assert "a worker process was killed" in done.stderr
        assert "Traceback" not in done.stderr
        # Perhaps none: the worker may have been killed before any part was finished.
        assert {path.suffix for path in out.glob(f"{output.PARTS}/*")} <= {".json"}
        assert process(*arguments).returncode == 0


def _alive(session: int) -> list[str]:
    """Commands of the processes that are still in a session; zombies have none."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((stat.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


class TestTrace:
    def test_inspect(self, trace: Path) -> None:
        document = json.loads(call("trace", "inspect", trace, "--json").stdout)
        assert document["sha256"] == hashlib.sha256(trace.read_bytes()).hexdigest()
        assert (document["requests"], document["format"], document["unit"]) == (300, "mooncake", "ms")
        assert document["lookups"] == document["distinct"] + document["reuses"] == 300 * 24
        assert document["sha256"] in call("trace", "inspect", trace, env={"COLUMNS": "200"}).stdout

    def test_convert_there_and_back(self, trace: Path, tmp_path: Path) -> None:
        seconds, back = tmp_path / "s.jsonl.zst", tmp_path / "ms.jsonl"
        there = call("trace", "convert", trace, seconds, "--to", "qwen-bailian", "--json")
        assert json.loads(there.stdout)["read_with"] == ["--block-size 512"]
        assert "--block-size 512" in there.stderr
        assert call("trace", "convert", seconds, back, "--block-size", 512).exit_code == 0
        simulated = [call("simulate", path, "--window-ms", 60, "--json").stdout for path in (trace, back)]
        assert simulated[0] == simulated[1]

    def test_convert_leaves_nothing_of_a_bad_trace(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\nx\n')
        assert call("trace", "convert", bad, tmp_path / "out.jsonl").exit_code == 2
        assert list(tmp_path.iterdir()) == [bad]

    def test_synth_to_standard_output_is_a_trace_and_nothing_else(self) -> None:
        result = call("trace", "synth", "-", "--requests", 20, "--json")
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert len(rows) == 20
        assert json.loads(result.stderr)["requests"] == 20

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        result = call("trace", "synth", tmp_path / "no" / "t.jsonl")
        assert result.exit_code == 1
        assert "No such file or directory" in result.stderr


class TestWithoutTheExtra:
    @pytest.mark.parametrize("missing", ["numba", "pyarrow", "matplotlib", "joblib", "numpy"])
    def test_sweep_says_what_to_install(self, missing: str, trace: Path, tmp_path: Path) -> None:
        code = f"import sys; sys.modules[{missing!r}] = None; {RUN}"
        done = process("sweep", trace, "--out", tmp_path / "out", code=code)
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            f"This needs {missing}, which is not installed: pip install 'kv-singleflight[sim]'"
        ]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("missing", ["numba", "numpy"])
    def test_simulate_says_what_to_install(self, missing: str, trace: Path) -> None:
        code = f"import sys; sys.modules[{missing!r}] = None; {RUN}"
        done = process("simulate", trace, "--window-ms", 10, code=code)
        assert done.returncode == 2
        assert "pip install 'kv-singleflight[sim]'" in done.stderr
        assert "Traceback" not in done.stderr

    def test_zst_says_what_to_install(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl.zst"
        assert call("trace", "synth", path).exit_code == 0
        code = f"import sys; sys.modules['zstandard'] = None; {RUN}"
        done = process("trace", "convert", path, tmp_path / "u.jsonl", code=code)
        assert done.returncode == 2
        assert "pip install 'kv-singleflight[sim]'" in done.stderr

    def test_registering_imports_nothing_heavy(self) -> None:
        code = (
            "import sys, typer; from singleflight.cli.simulate import register; register(typer.Typer())\n"
            "heavy = {'numba', 'numpy', 'pyarrow', 'joblib', 'matplotlib', 'zstandard'}\n"
            "print(sorted(heavy & set(sys.modules)))"
        )
        assert process(code=code).stdout.strip() == "[]"


def test_compiled_code_is_kept_where_it_can_be(trace: Path, tmp_path: Path) -> None:
    """A read-only home and package folder: the kernel still runs, from a cache in the temporary folder."""
    home = tmp_path / "home"
    home.write_text("not a folder")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {**os.environ, "HOME": str(home), "TMPDIR": str(scratch)}
    env.pop("XDG_CACHE_HOME", None)
    env.pop("NUMBA_CACHE_DIR", None)
    done = process("simulate", trace, "--window-ms", 60, "--json", env=env)
    assert done.returncode == 0, done.stderr
    assert list(scratch.rglob("*.nbi"))
