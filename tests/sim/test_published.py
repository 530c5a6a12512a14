"""The published table, to the last digit, from the one command."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from singleflight.cli.simulate import register

TRACES = ("conversation_trace", "synthetic_trace")

# DESIGN section 6: window -> median %, max %, max fan-in, rows with p99 fan-in > 1
TABLE: dict[str, dict[int, tuple[str, str, int, int]]] = {
    "conversation_trace": {
        **dict.fromkeys((10, 30, 100, 300, 1000), ("0.000493", "0.006068", 15, 0)),
        3000: ("0.000493", "0.025903", 22, 0),
        10000: ("0.055459", "0.108998", 49, 0),
    },
    "synthetic_trace": {
        1000: ("0.100243", "0.655305", 3, 0),
        3000: ("0.584295", "2.812072", 3, 16),
        10000: ("2.534440", "8.816033", 4, 60),
    },
}
COLUMNS = (
    "w_eff_ms,instances,capacity,routing,lookup,phase,requests,lookups,hits,attempts,removable,cohorts,"
    "dup_cohorts,dup_attempts,max_fanin,p99_fanin"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published") / "out"


@pytest.fixture(scope="module")
def printed(shared: Path, out: Path) -> Iterator[str]:
    app = typer.Typer()
    register(app)
    traces = [str(shared / "traces" / f"{name}.jsonl") for name in TRACES]
    result: Result = CliRunner().invoke(
        app, ["sweep", *traces, "--out", str(out)], env={"COLUMNS": "120"}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def summary(printed: str, out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("trace", TRACES)
def test_table(trace: str, summary: dict[str, Any]) -> None:
    rows = {row["w_eff_ms"]: row for row in summary[trace]["windows"]}
    assert sorted(rows) == [10, 30, 100, 300, 1000, 3000, 10000]
    for window, (median, high, max_fanin, above) in TABLE[trace].items():
        row = rows[window]
        assert f"{100 * row['median_redundancy']:.6f}" == median
        assert f"{100 * row['max_redundancy']:.6f}" == high
        assert (row["max_fanin"], row["rows_p99_fanin_above_1"], row["rows"]) == (max_fanin, above, 60)


def test_comparisons(summary: dict[str, Any]) -> None:
    conversation, synthetic = (summary[trace] for trace in TRACES)
    assert f"{conversation['max_lookup_difference']:.2e}" == "4.48e-06"
    assert f"{synthetic['max_lookup_difference']:.6f}" == "0.001269"
    assert conversation["affinity_vs_round_robin"] == {"above": 168, "equal": 42, "below": 0}
    assert synthetic["affinity_vs_round_robin"] == {"above": 92, "equal": 106, "below": 12}
    assert conversation["max_imbalance"] == 16.0
    assert f"{synthetic['max_imbalance']:.2f}" == "1.19"


def test_what_is_printed(printed: str) -> None:
    lines = [" ".join(line.replace("│", " ").split()) for line in printed.splitlines()]
    for row in (
        "<= 1 s 0.000493 % 0.006068 % 15 0",
        "3 s 0.000493 % 0.025903 % 22 0",
        "10 s 0.055459 % 0.108998 % 49 0",
        "1 s 0.100243 % 0.655305 % 3 0",
        "3 s 0.584295 % 2.812072 % 3 16 of 60",
        "10 s 2.534440 % 8.816033 % 4 60 of 60",
    ):
        assert lines.count(row) == 1, row
    text = " ".join(lines)
    for sentence in (
        "Largest difference between the lookups: 4.48e-6.",
        "Largest difference between the lookups: 0.001269.",
        "Affinity above / equal / below round-robin: 168 / 42 / 0 of 210 pairs.",
        "Affinity above / equal / below round-robin: 92 / 106 / 12 of 210 pairs.",
        "Largest imbalance (max / mean requests an instance): 16.0,",
        "Largest imbalance (max / mean requests an instance): 1.19,",
        "172,358,340 block lookups",
    ):
        assert text.count(sentence) == 1, sentence
    assert text.count("its redundancy and its hot spots are inseparable") == 1  # conversation's alone


@pytest.mark.parametrize("trace", TRACES)
def test_phase_rows(trace: str, printed: str, out: Path) -> None:
    text = (out / trace / "phase_rows.csv").read_text()
    assert text.splitlines()[0] == COLUMNS
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 840
    order = {name: i for i, name in enumerate(("round_robin", "affinity", "warmup", "steady"))}
    order |= {"contiguous_prefix": 0, "independent_blocks": 1}
    keys = [[order.get(row[name], row[name]) for name in COLUMNS.split(",")[:6]] for row in rows]
    keys = [[int(value) for value in key] for key in keys]
    assert keys == sorted(keys)
    for row in rows:
        counts = {name: int(row[name]) for name in COLUMNS.split(",")[6:]}
        assert counts["hits"] + counts["attempts"] == counts["lookups"]
        assert counts["cohorts"] + counts["removable"] == counts["attempts"]


@pytest.mark.parametrize("trace", TRACES)
def test_instance_rows_sum_to_phase_rows(trace: str, printed: str, out: Path) -> None:
    with open(out / trace / "instance_rows.csv", newline="") as file:
        instances = list(csv.DictReader(file))
    assert len(instances) == 5208
    axes = COLUMNS.split(",")[:6]
    sums: dict[tuple[str, ...], list[int]] = {}
    names = ("requests", "lookups", "hits", "attempts", "removable", "cohorts", "dup_cohorts", "dup_attempts")
    for row in instances:
        key = tuple(row[name] for name in axes)
        total = sums.setdefault(key, [0] * len(names))
        for i, name in enumerate(names):
            total[i] += int(row[name])
    with open(out / trace / "phase_rows.csv", newline="") as file:
        for row in csv.DictReader(file):
            assert sums[tuple(row[name] for name in axes)] == [int(row[name]) for name in names]


def test_simulate_agrees_with_the_sweep(shared: Path, printed: str, out: Path) -> None:
    app = typer.Typer()
    register(app)
    trace = str(shared / "traces" / "synthetic_trace.jsonl")
    arguments = ["--window-ms", "3000", "--instances", "4", "--capacity", "10000", "--routing", "affinity"]
    result = CliRunner().invoke(app, ["simulate", trace, *arguments, "--json"])
    document = json.loads(result.stdout)
    with open(out / "synthetic_trace" / "phase_rows.csv", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if [row[name] for name in COLUMNS.split(",")[:5]]
            == ["3000", "4", "10000", "affinity", "contiguous_prefix"]
        ]
    assert [row["phase"] for row in rows] == ["warmup", "steady"]
    for row in rows:
        found = document[row["phase"]]
        assert {name: str(found[name]) for name in COLUMNS.split(",")[6:]} == {
            name: row[name] for name in COLUMNS.split(",")[6:]
        }
