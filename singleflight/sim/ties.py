"""Requests with the same timestamp: together, or spread over the tick of a coarse clock?"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from singleflight.sim.columns import Columns


def tick_ms(times: NDArray[np.int64]) -> int:
    """The median time between distinct instants, ms: what a trace's clock may have rounded to. At least 1."""
    gaps = np.diff(np.unique(times))
    return max(1, int(np.median(gaps))) if len(gaps) else 1


def spread(columns: Columns) -> Columns:
    """The trace with ties spread uniformly, order kept.

    The i-th of k requests at t moves to ``t + i x min(tick, next instant - t) / k``, whole ms.
    """
    instants, first, count = np.unique(columns.times, return_index=True, return_counts=True)
    tick = tick_ms(columns.times)
    room = np.minimum(np.diff(instants, append=instants[-1] + tick), tick)
    rank = np.arange(columns.n_requests) - np.repeat(first, count)
    offset = rank * np.repeat(room, count) // np.repeat(count, count)
    return dataclasses.replace(columns, times=columns.times + offset)
