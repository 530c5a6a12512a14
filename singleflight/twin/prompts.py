"""Arrivals as the engine sees them: in whole blocks, and after the front end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from singleflight.twin.arrivals import Arrivals
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance


@dataclass(frozen=True)
class Prompts:
    """Per request, (R,).

    Attributes:
        at_engine: float64, s, when the engine can have it: the front end takes one request after another.
        taking_s: float64, s, for which that holds up the engine: nothing where it is not in its process.
        named: int64, full blocks of the prompt, which can be cached. asked: int64, of these, those that end
            before the last token, which is always computed: what is looked up.
        footprint: int64, blocks that prompt and output fill; the last token generated is never computed on.
        full: int64, of these, the full ones.
    """

    at_engine: NDArray[np.float64]
    taking_s: NDArray[np.float64]
    named: NDArray[np.int64]
    asked: NDArray[np.int64]
    footprint: NDArray[np.int64]
    full: NDArray[np.int64]

    @classmethod
    def of(cls, arrivals: Arrivals, figures: Figures, instance: Instance) -> Prompts:
        """Raises ValueError for a request that does not fit into the instance's cache; says which."""
        size, known = instance.block_tokens, np.diff(arrivals.offsets)
        tokens = arrivals.prompts + arrivals.outputs - 1
        footprint = -(-tokens // size)
        if (too_long := footprint > instance.gpu_blocks).any():
            r = int(too_long.argmax())
            raise ValueError(
                f"request {int(arrivals.source[r])} needs {int(footprint[r])} blocks of KV cache;"
                f" accepted: up to gpu_blocks ({instance.gpu_blocks})"
            )
        per_token = figures.frontend_per_token.value
        taking_s = np.asarray(figures.frontend_per_request.value + arrivals.prompts * per_token, np.float64)
        if instance.in_process:
            at_engine = arrivals.times.copy()
        else:
            at_engine = np.empty(arrivals.n_requests)
            free = 0.0
            for r, (at, takes) in enumerate(zip(arrivals.times.tolist(), taking_s.tolist(), strict=True)):
                at_engine[r] = free = max(at, free) + takes
            taking_s = np.zeros(arrivals.n_requests)
        return cls(
            at_engine,
            taking_s,
            np.minimum(arrivals.prompts // size, known),
            np.minimum((arrivals.prompts - 1) // size, known),
            footprint,
            tokens // size,
        )


def room(prompts: Prompts, instance: Instance) -> int:
    """Blocks that matter: a pool that all requests could fill twice does not run out of unused ones. (Who has
    waited in vain takes blocks twice.)"""
    return min(instance.gpu_blocks, 2 * int(prompts.footprint.sum()))
