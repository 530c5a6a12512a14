"""When a block comes again: the gaps that a load window would have to cover."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from singleflight.sim.columns import Columns

QUANTILES = (1, 10, 50, 90, 99)


def reuse_gaps(columns: Columns) -> NDArray[np.int64]:
    """ms from each lookup of a block back to the one before it, over all instances; (L - U,), unordered."""
    request = np.repeat(np.arange(columns.n_requests), np.diff(columns.offsets))
    order = np.argsort(columns.blocks, kind="stable")
    block, at = columns.blocks[order], columns.times[request[order]]
    gaps: NDArray[np.int64] = np.diff(at)[block[1:] == block[:-1]]
    return gaps


@dataclass(frozen=True)
class GapStatistics:
    """Reuse and arrival gaps of a trace.

    Attributes:
        lookups, distinct: block lookups and distinct blocks.
        reuses: lookups of a block seen before.
        gap_ms: percentile -> reuse gap, ms (lower of two neighbours).
        within: window W (ms) -> reuses whose gap is below W. No routing, capacity or lookup can make more
            attempts
            removable than that: who joins a load finds the block asked for less than W ago (R10).
        arrival_ms: percentile -> gap between requests, ms.
        ties: most requests at one instant.
        instants: distinct arrival times.
    """

    lookups: int
    distinct: int
    reuses: int
    gap_ms: dict[int, int]
    within: dict[int, int]
    arrival_ms: dict[int, int]
    ties: int
    instants: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def statistics(columns: Columns, windows: tuple[int, ...]) -> GapStatistics:
    """Gap statistics of a trace, with the windows (ms) of interest."""
    gaps = np.sort(reuse_gaps(columns))
    _, ties = np.unique(columns.times, return_counts=True)
    return GapStatistics(
        lookups=columns.n_lookups,
        distinct=len(columns.hashes),
        reuses=len(gaps),
        gap_ms=_quantiles(gaps),
        within={window: int(np.searchsorted(gaps, window)) for window in windows},
        arrival_ms=_quantiles(np.diff(columns.times)),
        ties=int(ties.max()),
        instants=len(ties),
    )


def _quantiles(values: NDArray[np.int64]) -> dict[int, int]:
    if not len(values):
        return {}
    found = np.percentile(values, QUANTILES, method="lower")
    return {q: int(value) for q, value in zip(QUANTILES, found, strict=True)}
