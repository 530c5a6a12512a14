"""What a report says in words about figures that are known."""

from __future__ import annotations

import json
from pathlib import Path

from bench.ab import report
from bench.ab.results import CellResult, Results, words
from bench.ab.rounds import BOUND, Round
from bench.ab.workloads import Cell, burst

COUNTS = {"gets": 2.0, "get_bytes": 2e6}


def cell(name: str, *, alone: bool = False, **ttft: list[float]) -> CellResult:
    """A cell in which every request of a round took the same; `ttft`: seconds by arm, one for each round."""
    rounds = [Round(arm, [t, t], COUNTS) for arm, times in ttft.items() for t in times]
    return CellResult(Cell(name, "a test", burst(2), alone=burst(1) if alone else None), rounds)


def run(*cells: CellResult, **more: object) -> Results:
    results = Results("python -m bench.ab", "a link", "2026-01-01", {"cpu": "x"}, list(cells), finished=True)
    vars(results).update(more)
    return results


def test_every_loss_is_named_with_its_interval() -> None:
    lost = cell("agents", stock=[1.0] * 5, park=[1.5, 1.6, 1.7, 1.8, 1.9], attach=[1.0] * 5)
    says = " ".join(words(run(lost)))
    assert 'park on "agents" (median 1.70, 1.50 to 1.90); park on "agents" (p99 1.70, 1.50 to 1.90)' in says
    assert 'attach on "agents"' not in says
    assert "No loss" not in says


def test_without_a_loss_that_is_said_and_what_is_not_settled_too() -> None:
    says = " ".join(words(run(cell("agents", stock=[1.0] * 5, attach=[0.9, 0.95, 1.0, 1.05, 1.1]))))
    assert "No loss: in none of 2 comparisons" in says
    assert "Not settled: in 2 of 2 comparisons" in says
    assert "Lost" not in says


def test_two_pairs_are_not_judged() -> None:
    says = " ".join(words(run(cell("agents", stock=[1.0] * 2, attach=[3.0] * 2))))
    assert "Fewer than 5 pairs" in says
    assert "loss:" not in says


def test_the_headline_gives_times_lower_and_the_lower_bound() -> None:
    arms = {"stock": [3.0] * 5, "attach": [0.3] * 5, BOUND: [0.25] * 5}
    (says, *_) = words(run(cell("burst of 32", alone=True, **arms)))
    assert "median TTFT 3.00 s -> 0.30 s, 10.0 times lower (10.0 to 10.0)" in says
    assert "1.20 (1.20 to 1.20) times the lower bound" in says


def test_off_that_differs_from_stock_is_named() -> None:
    differs = run(cell("agents", stock=[1.0] * 5, off=[0.9] * 5))
    assert '`off` ought to equal stock; its interval leaves 1 out: off on "agents"' in " ".join(
        words(differs)
    )


def test_a_stopped_run_says_so_and_what_is_missing() -> None:
    stopped = run(cell("a", stock=[1.0]), finished=False, left_out={"conversation_trace": "no such file"})
    says = " ".join(words(stopped))
    assert "The run was stopped before its end" in says
    assert "Left out: conversation_trace (no such file)." in says


def test_a_report_is_complete_and_small(tmp_path: Path) -> None:
    arms = ("stock", "off", "shadow", "attach", "park")
    cells = [cell(f"workload {i}", **{arm: [1.0] * 12 for arm in arms}) for i in range(28)]
    report.write(run(*cells, cell("<b>", **{arm: [1.0] for arm in arms})), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        "results.json",
        "report.html",
        "ratios.png",
        "cdfs.png",
        "resources.png",
    }
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 300_000
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["cells"][0]["ratios_to_stock"]["attach"]["median_s"]["value"] == 1.0
    assert data["cells"][-1]["ratios_to_stock"]["attach"]["median_s"]["low"] is None  # one pair
