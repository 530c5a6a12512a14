"""Reverse tests: each breaks a rule on purpose and shows that the right rule gives something else.

A model that is wrong in one of these ways gives clean answers (hazards M3 to M5), so agreeing with itself
proves nothing: the broken one has to be seen to differ.
"""

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from singleflight.sim import kernel, model
from singleflight.sim.columns import Columns
from singleflight.sim.config import PHASES, Config, Phase
from singleflight.sim.counts import Counts, Outcome
from singleflight.traces.request import Lengths, Request


def trace(*arrivals: tuple[int, list[int]]) -> list[Request]:
    return [Request(t, blocks, Lengths(1, 1)) for t, blocks in arrivals]


def steady(
    requests: list[Request], config: Config, instance: type[model.Instance] = model.Instance
) -> Counts:
    outcome = model.simulate(requests, config, instance)
    if instance is model.Instance:
        assert kernel.simulate(Columns.from_requests(requests), config) == outcome
    return outcome.phase("steady")


def one(window: int, capacity: int = 1000, **more: object) -> Config:
    return Config(window, 1, capacity, warmup=(0, 1), **more)  # type: ignore[arg-type]


class InsertOnMiss(model.Instance):
    """Wrong: the block is there at once, as in a plain cache simulator."""

    def open(self, block: int, now: int, phase: Phase) -> None:
        super().open(block, now, phase)
        self.complete(block)


class SlidingWindow(model.Instance):
    """Wrong: each member that joins keeps the load open for another W."""

    def join(self, block: int, now: int) -> None:
        super().join(block, now)
        self.loading[block].completes_ms = now + self.config.w_eff_ms
        self.loading.move_to_end(block)


class ClosedInterval(model.Instance):
    """Wrong: a load that ends at the instant of an arrival still counts as open."""

    def complete_until(self, now: int) -> None:
        super().complete_until(now - 1)


class Membership(model.Instance):
    """Wrong for a contiguous lookup: blocks after a hole are hits (hazard M4)."""

    def serve(self, now: int, blocks: list[int], phase: Phase) -> None:  # type: ignore[override]
        self.complete_until(now)
        for block in blocks:
            super().serve(now, [block], phase)


class NoTouch(model.Instance):
    """Wrong: a hit does not refresh the block (FIFO instead of LRU)."""

    def serve(self, now: int, blocks: list[int], phase: Phase) -> None:  # type: ignore[override]
        self.complete_until(now)
        before = list(self.cached)
        super().serve(now, blocks, phase)
        for block in before:
            self.cached.move_to_end(block)


BURSTS = trace(*((t + d, [1, 2, 3, t]) for t in range(10, 500, 50) for d in (0, 1, 4)))


def test_insert_on_miss_makes_redundancy_identically_zero() -> None:
    assert steady(BURSTS, one(10, capacity=2)).removable > 0
    assert steady(BURSTS, one(10, capacity=2), InsertOnMiss).removable == 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 30),
    st.integers(6, 10),
)
def test_insert_on_miss_never_removes_anything(
    arrivals: list[tuple[int, list[int]]], window: int, capacity: int
) -> None:
    requests = trace(*sorted(arrivals, key=lambda each: each[0]))
    assert steady(requests, one(window, capacity), InsertOnMiss).removable == 0


def test_insert_on_miss_on_a_shared_trace(shared: Path) -> None:
    with open(shared / "traces" / "synthetic_trace.jsonl") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(1500), strict=False)]
    requests = [Request(row["timestamp"], row["hash_ids"], Lengths(1, 1)) for row in rows]
    assert steady(requests, one(10_000, 10_000)).removable > 0
    assert steady(requests, one(10_000, 10_000), InsertOnMiss).removable == 0


def test_a_window_does_not_slide() -> None:
    chain = trace((0, [7]), (9, [7]), (18, [7]))
    right = model.simulate(chain, one(10))
    assert (right.fanin["steady"], right.phase("steady").hits) == ({2: 1}, 1)
    wrong = model.simulate(chain, one(10), SlidingWindow)
    assert (wrong.fanin["steady"], wrong.phase("steady").hits) == ({3: 1}, 0)
    assert kernel.simulate(Columns.from_requests(chain), one(10)) == right


def test_completion_exactly_at_arrival_is_a_hit() -> None:
    edge = trace((0, [7]), (10, [7]))
    assert steady(edge, one(10)).hits == 1
    assert steady(edge, one(10), ClosedInterval).hits == 0
    assert steady(trace((0, [7]), (9, [7])), one(10)).removable == 1


def test_a_prefix_ends_at_its_first_hole() -> None:
    # 1, 2, 3 are loaded into room for two, so 1 is gone when they are asked for again (hazard M4).
    hole = trace((0, [1, 2, 3]), (1, [1, 2, 3]))
    assert steady(hole, one(1, 2)).hits == 0
    assert steady(hole, one(1, 2, lookup="independent_blocks")).hits == 2
    assert steady(hole, one(1, 2), Membership).hits == 2


def test_a_hit_refreshes_the_block() -> None:
    touch = trace((0, [1, 2]), (1, [1]), (2, [3]), (3, [1]))
    assert steady(touch, one(1, 2)).hits == 2
    assert steady(touch, one(1, 2), NoTouch).hits == 1


def test_twenty_at_one_instant_are_one_cohort_led_by_the_first_in_file_order() -> None:
    ties = trace(*((5, [7, 100 + i]) for i in range(20)))
    columns = Columns.from_requests(ties)
    engine = kernel.Kernel(kernel.lay_out(columns, 1, "round_robin", (0, 1)))
    engine.run_arrays(10, 1000, True)
    assert engine.load_fanin[:2].tolist() == [20, 1]  # request 0 opened both
    assert engine.load_first[:2].tolist() == [0, 2]
    assert steady(ties, one(10)).max_fanin == 20


def test_instances_share_nothing() -> None:
    same = trace(*((0, [7]) for _ in range(4)))
    assert steady(same, Config(10, 2, 1000, "round_robin", warmup=(0, 1))).cohorts == 2
    assert steady(same, Config(10, 2, 1000, "affinity", warmup=(0, 1))).cohorts == 1


def fanins(outcome: Outcome) -> dict[int, int]:
    return {f: n for phase in PHASES for f, n in outcome.fanin[phase].items()}


def test_ids_of_64_bits_stay_distinct() -> None:
    for one_id, other in ((7, 2**32 + 7), (2**53, 2**53 + 1), (2**63, 0), (2**64 - 1, 2**63 - 1)):
        requests = trace((0, [one_id]), (0, [other]))
        assert fanins(kernel.simulate(Columns.from_requests(requests), one(10))) == {1: 2}
        assert fanins(model.simulate(requests, one(10))) == {1: 2}


def test_truncated_ids_would_be_noticed() -> None:
    requests = trace((0, [7]), (0, [2**32 + 7]))
    cut = [request._replace(hashes=[h & 0xFFFFFFFF for h in request.hashes]) for request in requests]
    assert fanins(kernel.simulate(Columns.from_requests(cut), one(10))) == {2: 1}


def test_affinity_uses_the_whole_id() -> None:
    requests = trace((0, [2**64 - 1]), (0, [2**63]), (0, [2**53 + 1]))
    columns = Columns.from_requests(requests)
    expected = [request.hashes[0] % 7 for request in requests]
    assert columns.instance_of(7, "affinity").tolist() == expected


def test_fan_in_beyond_the_first_histogram() -> None:
    # The kernel's histogram starts small and grows, for one instance and then for all.
    crowd = trace(*((0, [i % 3]) for i in range(1500)))
    for instances in (1, 4):
        config = Config(10, instances, 1000, "affinity", warmup=(0, 1))
        outcome = kernel.simulate(Columns.from_requests(crowd), config)
        assert outcome == model.simulate(crowd, config)
        assert outcome.phase("steady").max_fanin == 500
