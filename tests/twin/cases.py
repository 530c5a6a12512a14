"""Small traces, and figures under which only what a test is about takes time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from singleflight.traces.request import Lengths, Request
from singleflight.twin.arrivals import Arrivals
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance

BLOCK = 10
"""Tokens a block; and bytes, at one byte a token."""
STEP_S = 1e-6
IDLE_S = 1e-3
NOTICED_S = 2 * IDLE_S + STEP_S
"""A load that ends while the engine idles is reported at the start of the next idle step, and its request
computes in the step after: at most so much later."""

FREE = Figures().given(
    load_latency=0.0,
    load_bandwidth=1e12,
    kv_bytes_per_token=1.0,
    coordination_per_lookup=0.0,
    coordination_per_block=0.0,
    lookup_latency=0.0,
    lookup_per_block=0.0,
    prefill_rate=1e12,
    attention=0.0,
    prefill_context=0.0,
    step_overhead=STEP_S,
    decode_per_request=0.0,
    decode_context=0.0,
    idle_step=IDLE_S,
    frontend_per_request=0.0,
    frontend_per_token=0.0,
)
"""Everything at once, but for the steps."""

ROOMY = Instance(BLOCK, 100_000, max_num_batched_tokens=100_000, store="warm")


def prompts(rows: Iterable[tuple[float, Sequence[int]]], tail: int = 1, output: int = 1) -> Arrivals:
    """(s, names of the full blocks) of each request; `tail` tokens, fewer than a block, follow."""
    requests = [
        Request(round(1000 * at), [*names, 10**9 + i], Lengths(len(names) * BLOCK + tail, output))
        for i, (at, names) in enumerate(rows)
    ]
    return Arrivals.of(requests)


def burst(
    fan_in: int, shared: int, own: int = 0, at: float = 0.0, first: int = 0
) -> list[tuple[float, list[int]]]:
    """Requests at one moment over `shared` blocks, each with `own` ones behind them that nobody else has."""
    names = list(range(first, first + shared))
    return [
        (at, names + list(range(first + shared + i * own, first + shared + (i + 1) * own)))
        for i in range(fan_in)
    ]


def stored(arrivals: Arrivals, names: int) -> Arrivals:
    """The first so many blocks that the trace names are in the store from the start, the others are not."""
    return replace(arrivals, stored_from=np.where(np.arange(len(arrivals.stored_from)) < names, 0.0, np.inf))
