"""Synthetic traces: seeded, with a fan-in that is known before anything is simulated.

Unless a pattern says otherwise a request's own blocks occur nowhere else, so only what is shared on purpose
can overlap.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from singleflight.traces.request import Lengths, Request

Pattern = Literal["poisson", "bursts", "agents", "shared"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


@dataclass(frozen=True)
class Synth:
    """What to generate.

    Attributes:
        pattern: ``poisson``: independent requests, fan-in 1 everywhere.
            ``bursts``: groups of exactly `fan_in` requests over a prefix that only the group shares, all
            within `spread_ms` of the first: one instance with a window above `spread_ms` has fan-in
            `fan_in` on the prefix. ``agents``: a request, and `think_ms` after it `fan_in` children within
            `spread_ms` that share all its blocks and a plan none has seen, `shared_blocks` long: fan-in
            `fan_in` on the plan, under the same condition. ``shared``: each request starts with one of
            `prompts` system prompts, drawn with Zipf weights.
        requests: how many, at least 1.
        seed: the same arguments and seed give the same trace.
        rate: mean groups (or requests) a second, Poisson arrivals.
        fan_in: group size.
        shared_blocks, own_blocks: blocks of the shared prefix and of a request's own part.
        spread_ms: a group's arrivals lie within this of its first.
        think_ms: from parent to children.
        prompts: how many system prompts.
        block_size: tokens a block.
    """

    pattern: Pattern = "poisson"
    requests: int = 1000
    seed: int = 0
    rate: float = 3.0
    fan_in: int = 8
    shared_blocks: int = 8
    own_blocks: int = 16
    spread_ms: int = 50
    think_ms: int = 2000
    prompts: int = 10
    block_size: int = 512

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(f"pattern {self.pattern!r}; accepted: {', '.join(PATTERNS)}")
        for name in ("requests", "fan_in", "shared_blocks", "own_blocks", "prompts", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}; accepted: 1 or more")
        for name in ("spread_ms", "think_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}; accepted: 0 or more ms")
        if not 1e-6 <= self.rate <= 1e6:
            raise ValueError(f"rate {self.rate}; accepted: 0.000001 to 1000000 a second")


def generate(what: Synth) -> Iterator[Request]:
    """Yield `what.requests` requests in timestamp order. Holds only the groups that overlap in time."""
    rng = random.Random(what.seed)
    fresh = itertools.count()
    prompts = (
        [_take(fresh, what.shared_blocks) for _ in range(what.prompts)] if what.pattern == "shared" else []
    )
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    sequence = itertools.count()
    waiting: list[tuple[int, int, list[int]]] = []  # (ms, tie, blocks)
    clock = 0.0
    left = what.requests
    while left:
        clock += rng.expovariate(what.rate) * 1000
        start = int(clock)
        while waiting and waiting[0][0] <= start and left:
            yield _request(*heapq.heappop(waiting), rng, what)
            left -= 1
        for at, blocks in _group(start, rng, fresh, prompts, weights, what):
            heapq.heappush(waiting, (at, next(sequence), blocks))


def _group(
    start: int,
    rng: random.Random,
    fresh: Iterator[int],
    prompts: list[list[int]],
    weights: list[float],
    what: Synth,
) -> Iterator[tuple[int, list[int]]]:
    def own() -> list[int]:
        return _take(fresh, what.own_blocks)

    def spread() -> list[int]:
        return [0, *(rng.randint(0, what.spread_ms) for _ in range(what.fan_in - 1))]

    if what.pattern == "poisson":
        yield start, own()
    elif what.pattern == "shared":
        yield start, rng.choices(prompts, weights)[0] + own()
    elif what.pattern == "bursts":
        prefix = _take(fresh, what.shared_blocks)
        for offset in spread():
            yield start + offset, prefix + own()
    else:
        parent = own()
        yield start, parent
        plan = parent + _take(fresh, what.shared_blocks)
        for offset in spread():
            yield start + what.think_ms + offset, plan + own()


def _take(fresh: Iterator[int], n: int) -> list[int]:
    return list(itertools.islice(fresh, n))


def _request(at: int, tie: int, blocks: list[int], rng: random.Random, what: Synth) -> Request:
    # The last block is partly filled, as in real traces.
    tokens = (len(blocks) - 1) * what.block_size + rng.randint(1, what.block_size)
    return Request(at, blocks, Lengths(tokens, rng.randint(1, 500)))
