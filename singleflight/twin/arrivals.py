"""What one instance is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from singleflight.sim.columns import Columns
from singleflight.sim.config import Routing
from singleflight.traces.request import Request


@dataclass(frozen=True)
class Arrivals:
    """R requests with L block lookups over U distinct blocks.

    Attributes:
        times: (R,) float64, arrival, s, not decreasing, at least 0.
        offsets: (R + 1,) int64, request r has the blocks offsets[r] to offsets[r + 1].
        blocks: (L,) int32, a dense id for each distinct block of the prompts, front to back.
        prompts: (R,) int64, prompt length, tokens, at least 1.
        outputs: (R,) int64, generated length, tokens, at least 1.
        stored_from: (U,) float64, when another instance has put the block into the store, s; inf: never.
        source: (R,) int64, the number of each request in the trace.
    """

    times: NDArray[np.float64]
    offsets: NDArray[np.int64]
    blocks: NDArray[np.int32]
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    stored_from: NDArray[np.float64]
    source: NDArray[np.int64]

    @property
    def n_requests(self) -> int:
        return len(self.times)

    @classmethod
    def of(cls, requests: Sequence[Request], scale: float = 1.0) -> Arrivals:
        """All requests, for one instance. `scale`: how many times faster than recorded they come.

        Raises:
            ValueError: as `Columns.from_requests` does.
        """
        columns = Columns.from_requests(requests)
        return split(columns, *lengths(requests), instances=1, routing="round_robin", scale=scale)[0]


def lengths(requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(R,) prompt and (R,) output tokens, each at least 1; 1 too where the trace does not say the output."""
    prompts = np.array([max(request.lengths.input, 1) for request in requests], np.int64)
    outputs = np.array([max(request.lengths.output or 1, 1) for request in requests], np.int64)
    return prompts, outputs


def split(
    columns: Columns,
    prompts: NDArray[np.int64],
    outputs: NDArray[np.int64],
    instances: int,
    routing: Routing,
    scale: float = 1.0,
) -> list[Arrivals]:
    """What each instance is sent, those that get nothing left out.

    Time starts at the trace's first request. A block that one instance has been sent is in the store for the
    others from that request's arrival on (it takes a prefill more, which the twin of another instance does
    not know).
    """
    times = (columns.times - columns.times[0]) / 1000 / scale
    instance = columns.instance_of(instances, routing)
    sizes = np.diff(columns.offsets)
    of_lookup = np.repeat(instance, sizes)
    at = np.repeat(times, sizes)
    n_blocks = len(columns.hashes)
    found = []
    for each in np.unique(instance):
        mine, seen = instance == each, of_lookup == each
        elsewhere = np.full(n_blocks, np.inf)
        # Times do not decrease, so the first of each block is its earliest.
        blocks, first = np.unique(columns.blocks[~seen], return_index=True)
        elsewhere[blocks] = at[~seen][first]
        names, local = np.unique(columns.blocks[seen], return_inverse=True)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[mine])])
        found.append(
            Arrivals(
                times[mine],
                offsets,
                local.astype(np.int32),
                prompts[mine],
                outputs[mine],
                elsewhere[names],
                np.flatnonzero(mine),
            )
        )
    return found
