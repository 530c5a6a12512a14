"""Would another order of the receive queue than first come first served pay? A model, in virtual time.

    python bench/queue_order.py --out bench/results/queue_order.json

One link brings one load after the other; a load is not interrupted. `fifo` is vLLM's order. `shortest` takes
the load with the most requests waiting for it by block (weighted shortest job first, which has the least mean
of any order that does not interrupt), but first whoever has waited `ageing` times as long as it would have
under fifo. Waits are those of requests, from their arrival until the load that they wait for has landed; who
comes while a load of the same prefix is queued or in the air waits for that one. Computing is not in it.

Ratios are shortest to fifo of the same arrivals, the median of the seeds; p99 is over the requests of a seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

AGEING = (1.0, 1.5, 2.0)
SEEDS = 40
REQUESTS = 400
BLOCK_S = 0.001
"""Of the link, for a block: 64 KiB at 0.5 Gbit/s."""


class Arrival(NamedTuple):
    at: float
    prefix: int
    blocks: int


@dataclass
class Load:
    since: float
    blocks: int
    urgent: float
    """From when on it goes first."""
    waiting: list[float]
    """When each of those who wait for it has arrived."""


def waits(arrivals: list[Arrival], ageing: float | None) -> list[float]:
    """Of each request, in seconds, in no order; without `ageing`, under fifo."""
    found: list[float] = []
    shortest = ageing is not None
    queue: dict[int, Load] = {}
    flying: tuple[float, int, Load] | None = None
    coming = sorted(arrivals)
    now, i = 0.0, 0
    while i < len(coming) or flying or queue:
        if flying is None and queue:
            late = [p for p, load in queue.items() if load.urgent <= now] if shortest else []
            prefix = (
                late[0]
                if late
                else max(queue, key=lambda p: len(queue[p].waiting) / queue[p].blocks)
                if shortest
                else next(iter(queue))
            )
            load = queue.pop(prefix)
            flying = now + load.blocks * BLOCK_S, prefix, load
        if flying and (i == len(coming) or flying[0] <= coming[i].at):
            now, _, load = flying
            flying = None
            found += [now - since for since in load.waiting]
            continue
        now, prefix, blocks = coming[i]
        i += 1
        if flying and flying[1] == prefix:
            flying[2].waiting.append(now)
        elif prefix in queue:
            queue[prefix].waiting.append(now)
        else:
            before = (flying[0] - now if flying else 0.0) + sum(q.blocks for q in queue.values()) * BLOCK_S
            queue[prefix] = Load(now, blocks, now + (ageing or 0.0) * before, [now])
    return found


def mixed(draw: random.Random, busy: float) -> list[Arrival]:
    """Prefixes of 8 to 4,096 blocks (most are short); one in five is asked for by 2 to 16 at a time."""
    arrivals: list[Arrival] = []
    at = 0.0
    prefix = 0
    while len(arrivals) < REQUESTS:
        blocks = min(int(draw.lognormvariate(4.5, 1.2)) + 8, 4096)
        at += draw.expovariate(busy / (blocks_on_average() * BLOCK_S))
        prefix += 1
        sharing = draw.randint(2, 16) if draw.random() < 0.2 else 1
        arrivals += [Arrival(at + draw.uniform(0, 0.05), prefix, blocks) for _ in range(sharing)]
    return arrivals


@functools.cache
def blocks_on_average() -> float:
    draw = random.Random(0)
    return statistics.fmean(min(int(draw.lognormvariate(4.5, 1.2)) + 8, 4096) for _ in range(20_000))


def alike(draw: random.Random, busy: float) -> list[Arrival]:
    """Prefixes of 128 blocks, each asked for once: nothing to choose."""
    at, arrivals = 0.0, []
    for prefix in range(REQUESTS):
        at += draw.expovariate(busy / (128 * BLOCK_S))
        arrivals.append(Arrival(at, prefix, 128))
    return arrivals


def half_shared(draw: random.Random, busy: float) -> list[Arrival]:
    """Bursts of 16 for prefixes of 128 blocks: eight for one, eight each for its own, in any order."""
    at, arrivals = 0.0, []
    for burst in range(REQUESTS // 16):
        at += draw.expovariate(busy / (9 * 128 * BLOCK_S))
        prefixes = [100 * burst] * 8 + [100 * burst + 1 + n for n in range(8)]
        draw.shuffle(prefixes)
        arrivals += [Arrival(at + n * 1e-4, prefix, 128) for n, prefix in enumerate(prefixes)]
    return arrivals


def p99(found: list[float]) -> float:
    return statistics.quantiles(found, n=100)[98]


def compare(
    make: Callable[[random.Random, float], list[Arrival]], busy: float, ageing: float
) -> dict[str, float]:
    means, tails, most = [], [], []
    for seed in range(SEEDS):
        arrivals = make(random.Random(seed), busy)
        fifo, shortest = waits(arrivals, None), waits(arrivals, ageing)
        means.append(statistics.fmean(shortest) / statistics.fmean(fifo))
        tails.append(p99(shortest) / p99(fifo))
        most.append(max(shortest) / max(fifo))
    worse = sum(tail > 1.0 for tail in tails)
    return {
        "mean": round(statistics.median(means), 3),
        "p99": round(statistics.median(tails), 3),
        "max": round(statistics.median(most), 3),
        "seeds with a worse p99": worse,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = {
        f"{make.__name__}, link busy {busy:.0%}, ageing {ageing}": compare(make, busy, ageing)
        for make in (mixed, half_shared, alike)
        for busy in (0.5, 0.8, 0.95)
        for ageing in AGEING
    }
    about = {
        "unit": "ratio of shortest to fifo, median of the seeds",
        "seeds": SEEDS,
        "requests": REQUESTS,
    }
    args.out.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name:42}", row)


if __name__ == "__main__":
    main()
