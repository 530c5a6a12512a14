"""Ratios and differences of interleaved rounds, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
LOSS = 1.02
"""A ratio whose whole interval lies above this is a loss."""
ENOUGH = 5
"""Fewer pairs are not judged: two alone lie on the same side of anything every other time."""
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Ratio:
    """ours / stock: the median over pairs of rounds, and its interval at CONFIDENCE."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def is_loss(self) -> bool:
        return self.pairs >= ENOUGH and self.low > LOSS

    @property
    def may_be_loss(self) -> bool:
        """The interval reaches beyond LOSS, but does not lie above it: more pairs are needed to tell."""
        return self.pairs >= ENOUGH and self.low <= LOSS < self.high


def order(arms: Sequence[Thing], index: int) -> list[Thing]:
    """The arms of one round: A-B, then B-A, and so on, so that a steady drift weighs on all alike."""
    return list(arms) if index % 2 == 0 else list(reversed(arms))


def ratio(ours: Sequence[float], stock: Sequence[float], seed: int = 0) -> Ratio:
    """The median of ours[i] / stock[i], each pair from the same round, with a percentile bootstrap interval.

    Pairs are resampled whole (scipy.stats.bootstrap, paired). With n pairs the interval cannot be narrower
    than what n values can say: for five it is nearly their range. ValueError for unequal or empty input.
    """
    if len(ours) != len(stock) or not ours:
        raise ValueError(f"{len(ours)} rounds of ours and {len(stock)} of stock do not make pairs")
    mine, theirs = np.asarray(ours, float), np.asarray(stock, float)

    def statistic(a: Any, b: Any, axis: int = -1) -> Any:
        return np.median(a / b, axis=axis)

    value = float(statistic(mine, theirs))
    if len(ours) == 1:
        return Ratio(value, float("-inf"), float("inf"), 1)  # one pair says nothing about spread
    interval = stats.bootstrap(
        (mine, theirs),
        statistic,
        paired=True,
        vectorized=True,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=9999,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Ratio(value, float(interval.low), float(interval.high), len(ours))


@dataclass(frozen=True)
class Difference:
    """first - second: the median over pairs of rounds, and its interval at CONFIDENCE."""

    median: float
    low: float
    high: float
    pairs: int


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The median of first[i] - second[i], each pair from the same engine.

    Its interval is made of order statistics (scipy.stats.quantile_test), exact whatever the distribution: six
    pairs give their range, fewer give none. So a round that something else has disturbed does not move it.
    ValueError for unequal or empty input.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} and {len(second)} rounds do not make pairs")
    apart = np.asarray(first, float) - np.asarray(second, float)
    found = stats.quantile_test(apart, q=0.0, p=0.5).confidence_interval(CONFIDENCE)
    low, high = np.nan_to_num([found.low, found.high], nan=np.inf)
    return Difference(
        float(np.median(apart)), float(-high if np.isinf(low) else low), float(high), len(first)
    )
