"""Ties are spread over the tick of the trace's clock, in order, and never past the next instant."""

from __future__ import annotations

import numpy as np
import pytest

from singleflight.sim import ties
from singleflight.sim.columns import Columns
from singleflight.traces.request import Lengths, Request


def spread(*times: int) -> list[int]:
    requests = [Request(at, [i], Lengths(1, 1)) for i, at in enumerate(times)]
    return ties.spread(Columns.from_requests(requests)).times.tolist()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0, 0, 0, 3000, 3000, 6000), [0, 1000, 2000, 3000, 4500, 6000]),
        ((0, 10, 20, 30), [0, 10, 20, 30]),  # no ties, no change
        ((0, 0, 10, 20, 1000), [0, 5, 10, 20, 1000]),
        # At most a tick, however far the next instant is; the last instant has a tick too.
        ((0, 10, 20, 20, 1000, 1000), [0, 10, 20, 25, 1000, 1005]),
        ((5, 5, 5), [5, 5, 5]),  # one instant: no clock to speak of, 1 ms
    ],
)
def test_spread(before: tuple[int, ...], after: list[int]) -> None:
    assert spread(*before) == after


def test_order_is_kept_whatever_the_trace() -> None:
    rng = np.random.default_rng(7)
    times = np.sort(rng.integers(0, 50, 400) * 7)
    moved = np.array(spread(*times.tolist()))
    assert (np.diff(moved) >= 0).all()
    assert (np.diff(moved)[np.diff(times) > 0] > 0).all()
    assert ((moved - times) < ties.tick_ms(times)).all()
