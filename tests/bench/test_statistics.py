"""The figures a benchmark rests on: the order of rounds, the interval, and what is called a loss."""

from __future__ import annotations

import numpy as np
import pytest

from bench.ab.statistics import ENOUGH, Ratio, order, ratio


def test_arms_run_abba_so_that_each_is_as_often_early_as_late() -> None:
    rounds = [order(["stock", "off", "attach"], i) for i in range(4)]
    assert rounds[:2] == [["stock", "off", "attach"], ["attach", "off", "stock"]]
    places = {arm: sum(r.index(arm) for r in rounds) for arm in rounds[0]}
    assert len(set(places.values())) == 1


def test_the_ratio_is_the_median_of_pairs_whatever_the_machine_did_between_them() -> None:
    """The machine slows down twentyfold from the first pair to the last; within pairs ours takes half."""
    drift = np.linspace(1, 20, 9)
    found = ratio(list(0.5 * drift), list(drift))
    assert (found.value, found.low, found.high, found.pairs) == (0.5, 0.5, 0.5, 9)


def test_five_pairs_give_an_interval_of_nearly_their_range() -> None:
    found = ratio([1.0, 1.1, 1.2, 1.3, 1.4], [1.0] * 5)
    assert found.value == pytest.approx(1.2)
    assert found.low == pytest.approx(1.0)
    assert found.high == pytest.approx(1.4)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        stock = rng.lognormal(0, 0.5, 12)
        found = ratio(list(0.8 * stock * rng.lognormal(0, 0.1, 12)), list(stock))
        covered += found.low <= 0.8 <= found.high
    assert covered >= 180  # 95 % is the promise; a percentile interval of twelve is a little short of it


@pytest.mark.parametrize(
    ("found", "loss", "may_be"),
    [
        (Ratio(1.1, 1.03, 1.2, ENOUGH), True, False),
        (Ratio(1.1, 1.01, 1.2, ENOUGH), False, True),
        (Ratio(1.0, 0.99, 1.01, ENOUGH), False, False),
        (Ratio(1.1, 1.03, 1.2, ENOUGH - 1), False, False),
    ],
)
def test_a_loss_is_an_interval_above_the_mark_from_enough_pairs(
    found: Ratio, loss: bool, may_be: bool
) -> None:
    assert (found.is_loss, found.may_be_loss) == (loss, may_be)


def test_one_pair_says_nothing_about_its_spread() -> None:
    found = ratio([2.0], [1.0])
    assert (found.value, found.low, found.high) == (2.0, float("-inf"), float("inf"))
    with pytest.raises(ValueError, match="2 rounds of ours and 1 of stock do not make pairs"):
        ratio([1.0, 2.0], [1.0])
