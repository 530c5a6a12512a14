"""The proof's own logic: what is sent, how rounds take turns, and when a prediction counts as right."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.ab.statistics import Difference, difference
from bench.gate import compare, lone, measure, predict, table, workloads
from bench.gate.replay import own, prompt
from bench.gate.table import Row
from bench.gate.workloads import OWN, PARTS, Setup, Slice, Workload
from bench.page import replaced

REPOSITORY = Path(__file__).parents[2]
MODEL_TOKENS = 8192
ALL = [each for part in PARTS.values() for each in part]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two traces with as many rows as any slice asks for; the last block of a row is its own."""
    for name in ("conversation", "synthetic"):
        rows = (
            {
                "timestamp": 40 * n,
                "input_length": 1500,
                "output_length": 9,
                "hash_ids": [n // 3, 10**6 + n, 2 * 10**6 + n],
            }
            for n in range(6100)
        )
        (tmp_path / f"{name}_trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_every_request_fits_the_model_and_the_pool_and_stores_no_block(traces: Path) -> None:
    assert len({each.name for each in ALL}) == len(ALL)
    for workload in ALL:
        arrivals = workload.arrivals(traces)
        assert arrivals[0].at_s == 0
        assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(arrivals))
        for each in arrivals:
            tokens = len(each.blocks) * workloads.BLOCK_TOKENS + each.computed + each.output
            assert tokens <= min(MODEL_TOKENS, (workload.setup.kv_blocks - 1) * workloads.BLOCK_TOKENS)
            last = each.computed % workloads.BLOCK_TOKENS
            assert last + each.output <= workloads.BLOCK_TOKENS, "a generated token would complete a block"


def test_a_slice_is_faster_than_the_trace_and_keeps_what_its_rows_share(traces: Path) -> None:
    arrivals = Slice("conversation", first=3, count=4, speed=4.0).arrivals(traces)
    assert [each.at_s for each in arrivals] == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert [each.blocks[0] for each in arrivals] == [1, 1, 1, 2]
    assert all(len(each.blocks) == 2 for each in arrivals), "the block that is full only in part is computed"


def test_blocks_of_different_names_differ_and_no_two_requests_compute_the_same() -> None:
    block = workloads.BLOCK_TOKENS
    names = [0, 1, 2039, 2040, 2041, 5_000_000, lone.NAMES]
    blocks = [tuple(prompt([name], block)) for name in names]
    assert len(set(blocks)) == len(names)
    assert all(len(each) == block and max(each) < 2048 for each in blocks)
    ends = [tuple(own(OWN, seed)) for seed in range(0, 10**6, 997)]
    assert len(set(ends)) == len(ends)


def test_every_engine_runs_each_workload_equally_often_in_both_modes_and_takes_turns() -> None:
    for start in range(3):
        order = measure.rounds(["a", "b"], start, pairs=2)
        for name in ("a", "b"):
            modes = [mode for of, mode in order if of == name]
            assert modes[:2] == modes[:1:-1], "A-B-B-A"
            assert modes.count("stock") == modes.count("attach") == 2
    assert measure.rounds(["a"], 0, 1) != measure.rounds(["a"], 1, 1)


def test_workloads_of_one_setup_share_an_engine_and_blocks_are_stored_once() -> None:
    chosen = [
        Workload("a", "", workloads.bursts(2, 1, 1, 1.0, 1)),
        Workload("b", "", workloads.bursts(2, 1, 1, 1.0, 1), setup=Setup(threads=4)),
        Workload("c", "", workloads.bursts(2, 1, 1, 1.0, 1), gbit_s=None),
    ]
    made = list(measure.jobs(chosen, starts=2, pairs=1, traces=Path()))
    assert [(job["start"], list(job["workloads"])) for job in made] == [
        (0, ["a", "c"]), (0, ["b"]), (1, ["a", "c"]), (1, ["b"]),
    ]  # fmt: skip
    assert [list(job["store"]) for job in made] == [["a", "c"], ["b"], [], []]
    names = [
        {block for each in job["workloads"][name]["arrivals"] for block in each["blocks"]}
        for job in made[:2]
        for name in job["workloads"]
    ]
    assert sum(map(len, names)) == len(set.union(*names)), "no workload's blocks are another's"


def test_neither_a_drift_nor_one_disturbed_round_moves_the_difference() -> None:
    stock = [1.0, 2.0, 4.0, 8.0, 9.0, 10.0, 11.0]
    attach = [0.4, 1.6, 3.4, 7.5, 8.6, 9.5, 2.0]
    found = difference(stock, attach)
    assert found.median == pytest.approx(0.5)
    assert found.low == pytest.approx(0.4)
    assert found.high == 9.0
    assert found.pairs == 7


def test_fewer_than_six_pairs_have_no_interval_at_95_percent() -> None:
    found = difference([1.0] * 5, [0.5, 0.6, 0.5, 0.4, 0.5])
    assert (found.median, found.low, found.high) == (0.5, float("-inf"), float("inf"))
    with pytest.raises(ValueError, match="1 and 2 rounds do not make pairs"):
        difference([1.0], [1.0, 2.0])


COSTS = {
    "step_overhead": 5e-3,
    "prefill_rate": 2e4,
    "attention": 5e-8,
    "prefill_context": 8e-7,
    "decode_per_request": 1e-4,
    "decode_context": 1e-7,
    "lookup_latency": 1e-3,
    "lookup_per_block": 1e-5,
    "frontend_per_request": 1e-4,
    "frontend_per_token": 1e-7,
    "load_latency": 0.2,
    "load_bandwidth": 5e7,
    "parallel_loads": 0.5,
    "loading_slowdown": 1.8,
    "computing_slowdown": 1.25,
    "lookup_again": 0.4,
}


def step(chunk: int, before: int, prompts: int, decoding: int, contexts: int) -> tuple[float, ...]:
    """A sample of a step that costs exactly COSTS."""
    tokens, c = chunk * prompts, COSTS
    pairs = prompts * (chunk * before + chunk * (chunk - 1) // 2)
    seconds = (
        c["step_overhead"] + tokens / c["prefill_rate"] + pairs * c["attention"]
        + prompts * before * c["prefill_context"]
        + decoding * c["decode_per_request"] + contexts * c["decode_context"]
    )  # fmt: skip
    return tokens, pairs, prompts, decoding, contexts, seconds


def samples(**links: object) -> dict[str, Any]:
    """What an engine that costs exactly COSTS would have given (`bench.gate.lone`)."""
    c, block = COSTS, predict.BLOCK_BYTES
    shapes = [
        (8, 0, 1, 0, 0),
        (264, 0, 1, 0, 0),
        (2056, 0, 1, 0, 0),
        (8, 4096, 16, 0, 0),
        (264, 64, 16, 0, 0),
    ]
    beside_s = c["computing_slowdown"] * (c["load_latency"] + 128 * block / c["load_bandwidth"])
    decoding = [(0, 0, 0, 1, 8), (0, 0, 0, 16, 128), (0, 0, 0, 16, 65_000)]
    return {
        "steps": [step(*shape) for shape in shapes + decoding],
        "lookups": [(n, c["lookup_latency"] + n * c["lookup_per_block"]) for n in (1, 32, 128)],
        "again": [(n, c["lookup_again"] * c["lookup_latency"] + n * c["lookup_per_block"]) for n in (1, 128)],
        "added": [(n, c["frontend_per_request"] + n * c["frontend_per_token"]) for n in (8, 1032, 4104)],
        "idle_s": [0.001, 0.002],
        "links": [
            {
                "gbit_s": 0.4,
                "latency_s": 0.2,
                "threads": 4,
                "alone": [(n, c["load_latency"] + n * block / c["load_bandwidth"]) for n in (1, 32, 128)],
                "together": [
                    (128, c["load_latency"] + 128 * block / c["load_bandwidth"] / c["parallel_loads"])
                ],
                "decoding": [{"beside": [0.009, 0.009], "apart": [0.005, 0.005, 0.005], "load": [beside_s]}],
                **links,
            }
        ],
    }


def test_the_figures_of_an_engine_are_found_from_its_lone_prompts_and_loads() -> None:
    found = predict.figures([samples()], 0.4, 0.2, threads=4).as_dict()
    assert {name: found[name].value for name in COSTS} == pytest.approx(COSTS, rel=1e-3)
    assert found["idle_step"].value == pytest.approx(0.0015)


def test_a_slowdown_that_nobody_measured_is_a_default_and_says_so() -> None:
    found = predict.figures([samples(decoding=[])], 0.4, 0.2, threads=4)
    slowdowns = {"loading_slowdown", "computing_slowdown"}
    assert slowdowns <= set(found.defaults())
    assert not slowdowns & set(predict.figures([samples()], 0.4, 0.2, threads=4).defaults())


def test_rounds_of_both_modes_make_one_row_and_a_disturbed_round_does_not_move_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three engines, each with two rounds of each mode; one attach round was 100 s."""
    chosen = (Workload("burst", "", workloads.bursts(2, 4, 1, 1.0, 1), latency_s=0.2),)
    monkeypatch.setattr(workloads, "PARTS", {"first": chosen})
    counts = {"gets": 2, "bytes": 10 * predict.BLOCK_BYTES}

    def one(mode: str, ttft_s: float) -> dict[str, Any]:
        of_mode = {"removable": 4} if mode == "stock" else {"blocks_adopted": 4}
        return {
            "workload": "burst",
            "mode": mode,
            "ttft_s": [ttft_s, ttft_s],
            "counts": {**counts, **of_mode},
        }

    engines = [
        {
            "setup": asdict(Setup()),
            "lone": samples(threads=1),
            "rounds": [
                one("stock", 2.0), one("attach", attach), one("attach", 1.0), one("stock", 2.0),
            ],
        }
        for attach in (1.0, 1.0, 100.0)
    ]  # fmt: skip
    (found,) = compare.rows([{"part": "first", "engines": engines}], Path())
    assert (found.measured, found.saved.median, found.saved.pairs) == ({"stock": 2.0, "attach": 1.0}, 1.0, 6)
    assert found.removable == found.adopted == (4, 4)
    assert found.gets["stock"] == (2, 2)
    assert compare.rows([{"part": "first", "engines": []}], Path()) == []


def row(**changed: object) -> Row:
    usual = Row(
        part="first", name="burst", requests=8, engines=3,
        measured={"stock": 1.0, "attach": 0.5}, predicted={"stock": 1.1, "attach": 0.45},
        saved=Difference(0.5, 0.4, 0.6, 6), removable=(100.0, 104.0), adopted=(100.0, 100.0),
        gets={}, megabytes={}, figures={}, defaults=[],
    )  # fmt: skip
    return dataclasses.replace(usual, **changed)  # type: ignore[arg-type]


def test_a_prediction_is_judged_by_the_worse_of_both_modes() -> None:
    assert row().within(table.CLOSE)
    worse = row(predicted={"stock": 1.0, "attach": 0.6})
    assert not worse.within(table.CLOSE)
    assert worse.within(table.FAR)


@pytest.mark.parametrize(
    ("saved", "told", "agrees"),
    [
        (Difference(0.5, 0.1, 0.9, 6), {"stock": 1.0, "attach": 0.9}, True),
        (Difference(0.5, 0.1, 0.9, 6), {"stock": 1.0, "attach": 1.1}, False),
        (Difference(-0.5, -0.9, -0.1, 6), {"stock": 1.0, "attach": 1.1}, True),
        (Difference(0.1, -0.1, 0.3, 6), {"stock": 1.0, "attach": 1.1}, None),
    ],
)
def test_the_sign_is_judged_only_where_the_interval_has_one(
    saved: Difference, told: dict[str, float], agrees: bool | None
) -> None:
    assert row(saved=saved, predicted=told).sign_agrees is agrees


def test_one_removable_block_predicted_where_none_was_counted_is_a_miss() -> None:
    assert row(removable=(0.0, 0.0), adopted=(0.0, 0.0)).counts_agree
    assert not row(removable=(0.0, 1.0)).counts_agree
    assert not row(removable=(100.0, 106.0)).counts_agree


def test_the_page_says_the_parts_apart_and_every_miss_in_bold() -> None:
    rows = [row(), row(name="missed", part="second", predicted={"stock": 1.5, "attach": 1.6})]
    text = table.markdown(rows)
    first, second = text.split("**The second part.**")
    assert "**" not in first.replace("**The first part.**", "")
    assert "**+50%**" in second
    assert "**500 (400 to 600) / -100**" in second
    assert "within 30%: 0 of 1" in second
    marks = table.BEGIN, table.END
    page = replaced(f"before\n{table.BEGIN}\nold\n{table.END}\nafter", *marks, text)
    assert page.startswith("before")
    assert "old" not in page
    assert replaced(page, *marks, text) == page
    with pytest.raises(ValueError, match=r"bench\.gate\.compare"):
        replaced("no marks", *marks, text)


def test_the_page_says_what_is_not_measured() -> None:
    text = table.markdown([row(defaults=["coordination_per_block"])])
    assert "**The second part** is not measured yet." in text
    assert "Figures at their defaults: `coordination_per_block`." in text
    assert "not measured" not in table.markdown([row(part=part) for part in PARTS])


def test_a_row_comes_back_from_its_json() -> None:
    before = row(gets={"stock": [8.0, 8.0]}, removable=[1.0, 1.0], adopted=[1.0, 1.0])
    assert Row.of(json.loads(json.dumps(asdict(before)))) == before


def test_the_tables_on_the_gate_page_are_those_of_the_measured_comparison() -> None:
    comparison = REPOSITORY / "bench/results/gate/comparison.json"
    rows = [Row.of(each) for each in json.loads(comparison.read_text())]
    page = (REPOSITORY / "docs/gate.md").read_text()
    assert replaced(page, table.BEGIN, table.END, table.markdown(rows)) == page
    for part in {row.part for row in rows}:
        assert [row.name for row in rows if row.part == part] == [each.name for each in PARTS[part]]
