"""The gate's rule, over traffic whose answer is known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from singleflight.gate import decide
from singleflight.gate.decide import Deployment, Difference, Gate, Point, Traffic
from singleflight.traces.request import Lengths, Request
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance

from .conftest import BLOCK, Rows, bursts

LINK = Figures().given(load_bandwidth=50e6, kv_bytes_per_token=2048)


def traffic(rows: Rows, clock_is_fine: bool = True) -> Traffic:
    requests = [Request(at, ids, Lengths(BLOCK * len(ids), 1)) for at, ids in rows]
    return Traffic.of(requests, "t.jsonl", "t", "ab" * 32, clock_is_fine)


def gate(rows: Rows, figures: Figures = LINK, clock_is_fine: bool = True, **engine: int) -> Gate:
    instance = Instance(BLOCK, **{"gpu_blocks": 10_000, **engine}, store="warm")
    return Gate([traffic(rows, clock_is_fine)], Deployment(instance), figures)


def gain(rows: Rows, figures: Figures = LINK) -> float:
    """Of the mean, at the stated point alone."""
    at = gate(rows, figures)
    return at.difference(at.stated).mean


def test_a_tail_of_their_own_never_makes_a_burst_gain_more() -> None:
    """One unshared block a prompt once turned a clear no into a yes."""
    gains = [gain(bursts(count=14, common=100, own=own)) for own in (1, 2, 16, 64)]
    assert gains == sorted(gains, reverse=True)
    no_load_is_long = LINK.given(load_latency=0.0005, load_bandwidth=50e9)
    for own in (1, 2, 16):
        assert gain(bursts(count=14, common=100, own=own), no_load_is_long) < decide.LEAST_MEAN


def test_a_slower_link_never_makes_a_burst_gain_less() -> None:
    gains = [gain(bursts(count=14), LINK.given(load_bandwidth=rate)) for rate in (800e6, 200e6, 50e6)]
    assert gains == sorted(gains)


def test_the_coordination_cost_is_in_it() -> None:
    """Where nothing is shared it is all that is left."""
    alone = [(100 * i, [10 * i + j for j in range(8)]) for i in range(120)]
    free = LINK.given(coordination_per_lookup=0, coordination_per_block=0)
    assert gain(alone, free) == pytest.approx(0, abs=1e-9)
    assert gain(alone, LINK.given(coordination_per_lookup=0.01)) < -0.01


@pytest.mark.parametrize(
    ("mean", "p99", "pays"),
    [
        (decide.LEAST_MEAN, 0.0, True),
        (decide.LEAST_MEAN, decide.LEAST_P99, True),
        (decide.LEAST_MEAN - 1e-6, 0.5, False),
        (0.9, decide.LEAST_P99 - 1e-6, False),
    ],
)
def test_both_the_mean_and_p99_decide(mean: float, p99: float, pays: bool) -> None:
    assert Difference(Point(), mean, p99).pays is pays


def test_one_point_of_the_neighbourhood_that_does_not_pay_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    at = gate(bursts(count=14))
    assert at.enable
    odd = Point(0.5, 2.0, lookup_async=True)
    assert odd in at.neighbours
    found = at.difference

    def but_one(point: Point) -> Difference:
        return Difference(point, 0.5, -0.02) if point == odd else found(point)

    monkeypatch.setattr(at, "difference", but_one)
    assert not at.enable


def test_the_neighbourhood_is_what_was_stated_first_and_all_around_it() -> None:
    fine, coarse = gate(bursts()), gate(bursts(), clock_is_fine=False)
    assert fine.neighbours[0] == fine.stated == Point()
    assert len(fine.neighbours) == 5 * 2
    assert len(coarse.neighbours) == 5 * 2 * 2
    assert {(p.latency, p.bandwidth) for p in coarse.neighbours} == {
        (1, 1), (2, 0.5), (2, 2), (0.5, 0.5), (0.5, 2),
    }  # fmt: skip


def test_reuse_that_rests_on_a_coarse_clock_gains_less_when_ties_are_spread() -> None:
    """Sixteen at the same second: at once, or over the whole of it?"""
    rows = [
        (1000 * second, [*range(50 * second, 50 * second + 8), 10**6 + i])
        for second in range(10)
        for i in range(16)
    ]
    at = gate(rows, clock_is_fine=False)
    together, spread = (at.predicted(Point(spread=spread), "stock").removable for spread in (False, True))
    assert spread < together / 2


def test_half_a_yes_flips_where_it_says() -> None:
    at = gate(bursts(count=14))
    assert at.enable
    factor = at.flip()
    assert factor is not None
    assert factor < 1, "faster"
    slower = LINK.given(
        load_latency=LINK.load_latency.value * factor, load_bandwidth=LINK.load_bandwidth.value / factor
    )
    assert not gate(bursts(count=14), slower).enable


def test_a_burst_that_an_instance_admits_is_no_overload() -> None:
    assert not gate(bursts(), max_num_seqs=8).crowded
    assert gate([(0, [1, 2, 3 + i]) for i in range(200)], max_num_seqs=8).crowded


def test_how_many_wait_when_a_request_arrives() -> None:
    at = traffic([(0, [1]), (0, [2]), (10, [3]), (500, [4])] * 1)
    (arrived,) = decide.arrivals.split(at.columns, at.prompts, at.outputs, 1, "round_robin")
    waiting = decide._without_first_token(arrived, np.array([0.005, 0.1, 0.1, 0.1]))
    assert waiting.tolist() == [0, 1, 1, 0]
