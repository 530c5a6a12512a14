"""Load or compute: the bound, what is sent, and what is called met, equal or not settled."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.ab.servers import STOCK
from bench.choice import report, workloads
from bench.choice.bound import Jobs, least_mean_s, loads_only_s
from bench.choice.rates import LEAST_SHARE, Rates, wire_gbit_s
from bench.choice.report import BEGIN, END, Run, asked, markdown, verdict
from bench.choice.rounds import EQUAL_PAIRS, Measured, Round
from bench.choice.workloads import CHUNK, PARTS, PREFIX, SHARES, WIDE, Workload
from bench.page import replaced

MODEL_TOKENS = 8192
KV_BLOCK = 32
REPOSITORY = Path(__file__).parents[2]


# -- the bound -------------------------------------------------------------------------------------------


def tried(jobs: list[tuple[float, float, int]]) -> float:
    """The least mean of every order on every division; jobs: (load, compute, requests waiting)."""
    best = float("inf")
    for order in itertools.permutations(jobs):
        for on_link in itertools.product((False, True), repeat=len(order)):
            ends, total = [0.0, 0.0], 0.0
            for (load_s, compute_s, waiting), loaded in zip(order, on_link, strict=True):
                ends[loaded] += load_s if loaded else compute_s
                total += waiting * ends[loaded]
            best = min(best, total)
    return best / sum(waiting for *_, waiting in jobs)


@pytest.mark.parametrize(
    "kinds",
    [
        [Jobs(5, 1.0, 1.0)],
        [Jobs(5, 1.0, 3.0)],
        [Jobs(4, 3.0, 1.0)],
        [Jobs(1, 1.0, 1.5, waiting=4), Jobs(4, 1.0, 1.5)],
        [Jobs(2, 1.0, 2.0), Jobs(1, 0.4, 0.3, waiting=3), Jobs(2, 0.1, 0.05)],
    ],
)
def test_the_bound_is_the_best_of_all_orders_and_divisions(kinds: list[Jobs]) -> None:
    jobs = [(k.load_s, k.compute_s, k.waiting) for k in kinds for _ in range(k.count)]
    assert least_mean_s(kinds) == pytest.approx(tried(jobs))


def test_two_equally_fast_machines_nearly_halve_the_mean_of_sixteen() -> None:
    jobs = [Jobs(16, 1.0, 1.0)]
    assert loads_only_s(jobs) == 8.5
    assert least_mean_s(jobs) == 4.5


def test_a_core_that_is_much_slower_than_the_link_is_left_alone() -> None:
    jobs = [Jobs(4, 1.0, 5.0)]
    assert least_mean_s(jobs) == loads_only_s(jobs) == 2.5


def test_a_prefix_that_many_wait_for_goes_first() -> None:
    """Eight requests have it after one load; the other eight prefixes follow on both machines."""
    assert least_mean_s([Jobs(1, 1.0, 1.0, waiting=8), Jobs(8, 1.0, 1.0)]) == pytest.approx(
        (8 * 1 + 1 + 2 * 2 + 2 * 3 + 2 * 4 + 5) / 16
    )


def test_no_jobs_have_no_bound() -> None:
    with pytest.raises(ValueError, match="no job"):
        least_mean_s([Jobs(0, 1.0, 1.0)])


def test_a_link_is_as_fast_as_its_share_of_a_prefill_asks_less_what_is_not_the_wire() -> None:
    megabytes = PREFIX * 2048 / 1e6
    assert wire_gbit_s(1.0, 0.9, 0.1) == pytest.approx(megabytes * 8 / 1000 / 0.8)
    # A tenth of the prefill is less than what a load takes without a wire: then the wire has a quarter of it.
    assert wire_gbit_s(0.1, 0.9, 0.2) == pytest.approx(megabytes * 8 / 1000 / (LEAST_SHARE * 0.09))


# -- what is sent ----------------------------------------------------------------------------------------


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 500 * n, "input_length": 6000 + n, "output_length": 9, "hash_ids": [*range(11), 50 + n]}
        for n in range(60)
    ]
    for name in ("conversation_trace", "synthetic_trace"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def every(folder: Path) -> list[Workload]:
    return [each for part in PARTS for each in workloads.of(part, folder, quick=False)]


def test_every_request_fits_the_model_and_no_two_workloads_have_one_name(traces: Path) -> None:
    found = every(traces)
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert [row["timestamp"] for row in each.load.rows] == sorted(r["timestamp"] for r in each.load.rows)
        for row in each.load.rows:
            assert 0 < row["input_length"] <= MODEL_TOKENS - row["output_length"]
            assert len(row["hash_ids"]) * CHUNK >= row["input_length"]


def test_a_round_finds_its_prefixes_in_the_store_and_leaves_nothing_new_there(traces: Path) -> None:
    for each in (w for w in every(traces) if w.part != "traces"):
        filled = {tuple(row["hash_ids"][:-1]) for row in each.fill.rows}
        for row in each.load.rows:
            prefix, own = tuple(row["hash_ids"][:-1]), row["input_length"] % CHUNK
            assert prefix in filled or (not prefix and each.decoding)
            assert own < KV_BLOCK
            assert own + row["output_length"] <= KV_BLOCK or each.decoding


def test_what_the_bound_counts_is_what_is_sent(traces: Path) -> None:
    for each in (w for w in every(traces) if w.jobs):
        sent: dict[tuple[int, ...], int] = {}
        for row in each.load.rows:
            prefix = tuple(row["hash_ids"][:-1])
            sent[prefix] = sent.get(prefix, 0) + 1
        counted = [(tokens, waiting) for count, tokens, waiting in each.jobs for _ in range(count)]
        assert sorted((len(prefix) * CHUNK, n) for prefix, n in sent.items()) == sorted(counted)
        members = [i for group in each.groups.values() for i in group]
        assert sorted(members) == list(range(len(each.load.rows))) or not members


def test_lone_prefills_are_of_what_nobody_has_sent() -> None:
    first, second = (workloads.new([512, 512]) for _ in range(2))
    chunks = [row["hash_ids"][0] for row in (*first.rows, *second.rows)]
    assert len(set(chunks)) == 4
    assert first.name != second.name


def test_traces_that_are_not_there_are_left_out_and_the_short_run_has_one_of_most_parts(
    tmp_path: Path,
) -> None:
    assert workloads.of("traces", tmp_path, quick=False) == []
    assert {w.part for part in PARTS for w in workloads.of(part, tmp_path, quick=True)} == {
        "unique", "mixed", "decode", "equal", "sizes",
    }  # fmt: skip


# -- what is said ----------------------------------------------------------------------------------------

RATES = Rates(
    0.0,
    dict.fromkeys(workloads.SIZES, 1.0),
    {link: dict.fromkeys(workloads.SIZES, 1.0) for link in (*SHARES, WIDE)},
    {"1": 0.08, "1/3": 0.24, "1/10": 0.8, WIDE: None},
)
CPU = dict.fromkeys(
    ("busy_ns", "busy_steps", "idle_ns", "idle_steps", "connector_ns", "lookup_ns", "lookups"), 1000
)


def measured(workload: Workload, pairs: int = 5, **means: float) -> dict[str, Any]:
    """Its JSON, where every request of an arm took as long, in all rounds; compute computed two."""
    found = Measured(workload, RATES, [])
    for _ in range(pairs):
        for arm, mean_s in means.items():
            counts = {"gets": 1.0, "chose_compute": 2.0 if arm == "compute" else 0.0}
            found.rounds.append(Round(arm, [mean_s] * len(workload.load.rows), [], counts, CPU))
    return found.as_json()


def documents(part: str, *found: dict[str, Any]) -> list[dict[str, Any]]:
    rates = {**vars(RATES), "prefill_s": {"4096": 1.0}, "load_s": {"1": {"4096": 1.0}}}
    rates = json.loads(json.dumps(rates))
    return [{"part": part, "workloads": list(found), "rates": rates, "left_out": {}}]


def test_the_distance_to_the_bound_is_judged_beside_the_ratio_to_stock() -> None:
    (first, *_) = workloads.of("unique", Path(), quick=False)
    says = {what: v for what, _, v in asked(documents("unique", measured(first, stock=8.5, compute=5.0)))}
    assert says == {
        "unique, 1: compute, mean to bound at most 1.25": "met",  # 5.0 / 4.5
        "unique, 1: compute, last to stock at most 1": "met",
    }
    late = measured(first, stock=8.5, compute=9.0)
    assert {v for *_, v in asked(documents("unique", late))} == {"missed"}


def test_attach_is_not_asked_to_reach_the_bound() -> None:
    (first, *_) = workloads.of("unique", Path(), quick=False)
    assert list(asked(documents("unique", measured(first, stock=8.5, attach=8.5)))) == []


def test_the_shared_half_is_compared_with_attach() -> None:
    (first, *_) = workloads.of("mixed", Path(), quick=False)
    found = documents("mixed", measured(first, stock=8.0, attach=4.0, compute=4.1))
    says = {what: v for what, _, v in asked(found)}
    assert says["mixed, 1: compute, shared mean to attach at most 1"] == "missed"


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [(0.8, 1.0, "met"), (1.01, 1.1, "missed"), (0.9, 1.1, "not settled"), (None, None, "not settled")],
)
def test_an_interval_on_both_sides_of_the_limit_settles_nothing(
    low: float | None, high: float | None, says: str
) -> None:
    assert verdict(low, high, 1.0) == says


def test_computing_over_a_wide_link_is_a_miss_and_equality_is_shown_by_its_interval() -> None:
    wide, *_ = workloads.of("equal", Path(), quick=False)
    says = [
        (what.partition(": ")[2], v)
        for what, _, v in asked(documents("equal", measured(wide, stock=1.0, attach=1.01, compute=1.2)))
    ]
    assert says == [
        ("compute loads throughout", "missed"),
        ("attach, mean to stock within 0.95 to 1.05", "equal"),
        ("compute, mean to stock within 0.95 to 1.05", "different"),
    ]


def test_more_pairs_are_run_until_equality_is_shown_for_every_arm() -> None:
    wide = replace(workloads.of("equal", Path(), quick=False)[0])

    def rounds(pairs: int, **means: float) -> Measured:
        found = Measured(wide, RATES, [])
        for _ in range(pairs):
            found.rounds += [Round(arm, [s], [], {}, CPU) for arm, s in means.items()]
        return found

    assert not rounds(EQUAL_PAIRS - 1, stock=1.0, attach=1.0).settled()
    assert rounds(EQUAL_PAIRS, stock=1.0, attach=1.0).settled()
    assert not rounds(EQUAL_PAIRS, stock=1.0, attach=1.0, compute=1.2).settled()


def test_what_is_written_comes_back_and_fills_the_page_between_its_marks(tmp_path: Path) -> None:
    run = Run("python -m bench.choice", {"cpu": "x"}, "a link", RATES)
    (first, *_) = workloads.of("mixed", Path(), quick=False)
    found = Measured(first, RATES, [])
    for _ in range(3):
        for arm, mean_s in {STOCK: 8.0, "attach": 4.0, "compute": 3.0}.items():
            found.rounds.append(Round(arm, [mean_s] * 16, [], {"chose_compute": 3.0}, CPU))
    run.take("mixed", found)
    run.left_out("mixed", "another", "the time was over")
    run.write(tmp_path)
    back = report.read(tmp_path)
    report.write(tmp_path, back)
    assert {path.name for path in tmp_path.iterdir()} == {"mixed.json", "report.md", "report.png"}
    text = markdown(back)
    assert "| mixed, 1 | 8.00 / 8.00 | 0.50 (0.50 to 0.50), 0.50 (0.50 to 0.50) | 0.38" in text
    assert "3 of 16" in text
    assert "Left out: another (the time was over)." in text
    page = replaced(f"before\n{BEGIN}\nold\n{END}\nafter", BEGIN, END, text)
    assert page.startswith("before")
    assert "old" not in page
    assert replaced(page, BEGIN, END, text) == page
    with pytest.raises(ValueError, match=r"bench\.choice\.report"):
        replaced("no marks", BEGIN, END, text)


def test_the_tables_on_the_page_are_those_of_the_results_that_it_names() -> None:
    """Until there are results the page says so between its marks."""
    page = (REPOSITORY / "docs/benchmarks.md").read_text()
    between, _, after = page.partition(BEGIN)[2].partition(END)
    if named := re.search(r"bench/results/load_or_compute-[^/)]+", after):
        assert replaced(page, BEGIN, END, markdown(report.read(REPOSITORY / named[0]))) == page
    else:
        assert between.strip() == "Not measured yet."
