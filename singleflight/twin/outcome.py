"""What the twin says of one run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Gets:
    """Every Get, in the order of the queue, (G,).

    Attributes:
        request: int64, whose load it is: index into the arrivals. blocks: int64, that it brings.
        queued_s, started_s, ended_s: float64, put into the queue, taken by a receive thread, complete.
        reported_s: float64, when the scheduler was told: at the end of an engine step.
    """

    request: NDArray[np.int64]
    blocks: NDArray[np.int64]
    queued_s: NDArray[np.float64]
    started_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    reported_s: NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """Per request, (R,), in the order of the arrivals.

    Attributes:
        ttft_s: float64, from arrival to the end of the step that computes the last prompt token.
        admitted_s: float64, from arrival to the seat: the start of the first step that computes for it.
        local_blocks: int64, found in the local cache when it was admitted, or loads of its own began.
        adopted_blocks: int64, of others' loads, that it waited for (attach).
        loaded_blocks: int64, brought by Gets of its own.
        removable_blocks: int64, of these, those that another request was loading already when this load was
            allocated: what shadow mode counts as `removable`. In stock mode; else what the mode has left.
        computed_tokens: int64, of the prompt, computed.
        lookups: int64, how often the store was asked for it.
        gets: every Get.
        block_bytes: of a block.
        steps: engine steps that computed something. fell_back: followers whose deadline has passed.
    """

    ttft_s: NDArray[np.float64]
    admitted_s: NDArray[np.float64]
    local_blocks: NDArray[np.int64]
    adopted_blocks: NDArray[np.int64]
    loaded_blocks: NDArray[np.int64]
    removable_blocks: NDArray[np.int64]
    computed_tokens: NDArray[np.int64]
    lookups: NDArray[np.int64]
    gets: Gets
    block_bytes: float
    steps: int
    fell_back: int

    @property
    def n_gets(self) -> int:
        return len(self.gets.request)

    @property
    def bytes(self) -> float:
        """Brought by all Gets."""
        return float(self.gets.blocks.sum()) * self.block_bytes
