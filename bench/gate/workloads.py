"""The workloads of the proof, as data. FIRST was written down before the model was tuned.

A block is 32 tokens of the tiny model, 64 KiB of KV. All blocks of a workload are in the store before its
first round, and none is local when a round begins; what a request computes has never been stored.
Slices of traces are from where most blocks come again within seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from singleflight.traces.reader import Options, TraceReader

BLOCK_TOKENS = 32
OWN = 8
"""Tokens of each request's own at its end, computed and too short to be stored."""
NARROW = 0.4
"""Gbit/s: 128 blocks (8.4 MB) take 0.17 s, as those of a 70B model at 64 Gbit/s (docs/benchmarks.md)."""
LONGEST = 120
"""Blocks of the longest request kept of a trace."""


@dataclass(frozen=True)
class Setup:
    """What an engine is started with.

    Attributes:
        threads: VLLM_MOONCAKE_LOAD_RECV_THREADS; vLLM's default is 1.
        kv_blocks: blocks of its pool.
        seats: max_num_seqs.
    """

    threads: int = 1
    kv_blocks: int = 16_000
    seats: int = 128


@dataclass(frozen=True)
class Arrival:
    """One request: seconds from the round's start, its blocks in the store, tokens computed and generated."""

    at_s: float
    blocks: tuple[int, ...]
    computed: int = OWN
    output: int = 4


@dataclass(frozen=True)
class Slice:
    """Part of a public trace, a block of which becomes a block here; only its place is written down.

    Attributes:
        trace: `conversation` or `synthetic`.
        first, count: rows, of those that are no longer than LONGEST.
        speed: how many times faster than recorded.
    """

    trace: str
    first: int
    count: int
    speed: float

    def arrivals(self, folder: Path) -> list[Arrival]:
        """OSError if the trace is not in the folder. The last block of a row is only in part full, so it is
        computed: OWN tokens stand for it."""
        reader = TraceReader(str(folder / f"{self.trace}_trace.jsonl"), Options())
        fit = [row for row in reader if len(row.hashes) <= LONGEST]
        rows = fit[self.first : self.first + self.count]
        return [
            Arrival(
                (row.timestamp_ms - rows[0].timestamp_ms) / 1000 / self.speed,
                tuple(row.hashes[:-1]),
                output=8,
            )
            for row in rows
        ]


@dataclass(frozen=True)
class Workload:
    """What is sent, over which link, to which engine, and why it is in.

    Attributes:
        gbit_s: the link's rate; None: loopback, unshaped.
        latency_s: before each Get, in the receive thread.
    """

    name: str
    why: str
    load: tuple[Arrival, ...] | Slice
    gbit_s: float | None = NARROW
    latency_s: float = 0.0
    setup: Setup = field(default_factory=Setup)

    def arrivals(self, traces: Path) -> Sequence[Arrival]:
        return self.load.arrivals(traces) if isinstance(self.load, Slice) else self.load


def bursts(
    fan_in: int, shared: int, tail: int, every_s: float, count: int, computed: int = OWN
) -> tuple[Arrival, ...]:
    """`count` prompts of `shared` blocks, one after the other, each asked by `fan_in` requests at one moment
    with `tail` blocks of their own."""
    names = _unused()
    found = []
    for number in range(count):
        prompt = _take(names, shared)
        found += [Arrival(number * every_s, prompt + _take(names, tail), computed) for _ in range(fan_in)]
    return tuple(found)


def poisson(count: int, rate: float, blocks: int, seed: int = 7) -> tuple[Arrival, ...]:
    """Requests that share nothing, `rate` a second."""
    names, drawn, at_s = _unused(), random.Random(seed), 0.0
    found = []
    for _ in range(count):
        found.append(Arrival(round(at_s, 6), _take(names, blocks)))
        at_s += drawn.expovariate(rate)
    return tuple(found)


def long_and_short(
    count: int, every_s: float, long: int, short: int, followers: int, after_s: float
) -> tuple[Arrival, ...]:
    """`count` times: a prompt of `long` blocks, then `followers` that share its first `short` and go on with
    one of their own."""
    names = _unused()
    found = []
    for number in range(count):
        prompt = _take(names, long)
        found.append(Arrival(number * every_s, prompt))
        found += [
            Arrival(number * every_s + after_s, prompt[:short] + _take(names, 1)) for _ in range(followers)
        ]
    return tuple(found)


def at_once(prompts: int, fan_in: int, blocks: int, output: int) -> tuple[Arrival, ...]:
    """A batch handed over at once: the children of one prompt one after the other, then the next prompt."""
    names = _unused()
    shared = [_take(names, blocks) for _ in range(prompts)]
    return tuple(
        Arrival(0.0, each + _take(names, 1), output=output) for each in shared for _ in range(fan_in)
    )


def _unused() -> Iterator[int]:
    return iter(range(10**6))


def _take(names: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(names) for _ in range(count))


FOUR = Setup(threads=4)
FIRST: tuple[Workload, ...] = (
    Workload(
        "burst of 8",
        "what single-flight is for: a narrow link, vLLM's one receive thread, a block of each request's own",
        bursts(8, 96, 1, every_s=1.5, count=4),
    ),
    Workload(
        "burst of 2, wide link",
        "the least there is to share, over a link on which a load is hardly longer than a step",
        bursts(2, 64, 1, every_s=0.4, count=12),
        gbit_s=None,
    ),
    Workload(
        "tails of 64",
        "half of what each request loads is its own, and all tails queue in one thread",
        bursts(8, 64, 64, every_s=2.5, count=2),
    ),
    Workload(
        "computed tails",
        "after the shared load each request computes 256 tokens: prefill is batched, and that takes longer"
        " than the load",
        bursts(8, 64, 0, every_s=2.5, count=3, computed=256 + OWN),
    ),
    Workload("Poisson, nothing shared", "pure overhead", poisson(40, rate=8.0, blocks=24)),
    Workload(
        "conversation, 6 times as fast",
        "a real mix of local hits, loads and rare overlaps; arrivals in ticks of 3 s",
        Slice("conversation", 4000, 90, 6.0),
    ),
    Workload(
        "partial overlap, 4 threads, far store",
        "0.2 s a Get, idle threads: waiting for another's load before one's own would lose a round trip",
        bursts(8, 16, 48, every_s=1.5, count=3),
        gbit_s=None,
        latency_s=0.2,
        setup=FOUR,
    ),
    Workload(
        "synthetic, 4 threads, far store",
        "agents' prompts that grow: shared prefixes of very different lengths",
        Slice("synthetic", 3400, 90, 5.0),
        gbit_s=None,
        latency_s=0.2,
        setup=FOUR,
    ),
    Workload(
        "batch at once",
        "96 requests handed over together to 16 seats: arrival is not admission",
        at_once(prompts=12, fan_in=8, blocks=32, output=12),
        setup=Setup(seats=16),
    ),
)
"""Chosen before the model was tuned."""
SIXTEEN = Setup(threads=16)
SECOND: tuple[Workload, ...] = (
    Workload(
        "burst of 32",
        "four times the fan-in of the first part's: nearly all that stock does is duplicate",
        bursts(32, 48, 1, every_s=3.0, count=1),
    ),
    Workload(
        "burst of 2, narrow link",
        "the least there is to share, where a load takes long",
        bursts(2, 80, 4, every_s=0.5, count=4),
    ),
    Workload(
        "tails of 64, wide link",
        "loads are hardly longer than a step: what is left is computing",
        bursts(8, 32, 64, every_s=0.9, count=2),
        gbit_s=None,
    ),
    Workload(
        "long and short",
        "one prompt of 120 blocks, and a moment later three that need its first 8",
        long_and_short(count=4, every_s=0.8, long=120, short=8, followers=3, after_s=0.05),
    ),
    Workload(
        "conversation, 12 times as fast",
        "another part of the trace, and twice the load: queues",
        Slice("conversation", 4850, 80, 12.0),
    ),
    Workload(
        "bursts of 8, 16 threads, far store",
        "every load has a thread of its own, so there is no queue to shorten",
        bursts(8, 32, 1, every_s=1.0, count=2),
        gbit_s=None,
        latency_s=0.2,
        setup=SIXTEEN,
    ),
    Workload(
        "synthetic, 16 threads, far store",
        "agents' prompts, where all that overlaps is in the air together",
        Slice("synthetic", 3250, 60, 5.0),
        gbit_s=None,
        latency_s=0.2,
        setup=SIXTEEN,
    ),
    Workload(
        "KV pressure",
        "room for two and a half prompts: four copies of one do not fit together",
        bursts(4, 112, 1, every_s=1.2, count=2),
        setup=Setup(kv_blocks=280),
    ),
)
"""Written down after the model was tuned on the first part, before any of these was measured."""
THIRD: tuple[Workload, ...] = (
    Workload(
        "burst of 4, half shared",
        "a small burst, of which half is each request's own",
        bursts(4, 40, 40, every_s=1.2, count=3),
    ),
    Workload(
        "burst of 16, wide link",
        "many requests for a load that takes two or three steps",
        bursts(16, 64, 1, every_s=1.0, count=2),
        gbit_s=None,
    ),
    Workload(
        "bursts of 6 with work",
        "some tails to load and 104 tokens to compute behind them",
        bursts(6, 72, 8, every_s=1.5, count=3, computed=96 + OWN),
    ),
    Workload(
        "Poisson, wide link",
        "pure overhead, half of the time busy",
        poisson(40, rate=12.0, blocks=48, seed=11),
        gbit_s=None,
    ),
    Workload(
        "two prompts at once",
        "two loads in one queue, each with followers",
        bursts(8, 48, 1, every_s=0.02, count=2),
    ),
    Workload(
        "synthetic, 4 times as fast",
        "a part of the trace in which little overlaps, over the narrow link",
        Slice("synthetic", 3000, 60, 4.0),
    ),
    Workload(
        "conversation, 8 times as fast, 4 threads",
        "another part of the trace; loads share the link",
        Slice("conversation", 6000, 80, 8.0),
        setup=FOUR,
    ),
    Workload(
        "burst of 8, far store",
        "a round trip of 50 ms and one thread: tails queue behind it",
        bursts(8, 32, 4, every_s=1.2, count=3),
        latency_s=0.05,
    ),
)
"""Written down after both others had been compared and the twin mended (its front end), before any of these
was measured."""
PARTS = {"first": FIRST, "second": SECOND, "third": THIRD}
