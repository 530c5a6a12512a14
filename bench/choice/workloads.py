"""What is sent, as data. Prefixes are in the store before a round, and none is local unless it says so."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from bench.ab.workloads import CHUNK, OUTPUT, OWN, Load, trace

PREFIX = 4096
SHARES = {"1": 1.0, "1/3": 1 / 3, "1/10": 1 / 10}
"""Links: what one load takes of one prefill. `MIDDLE` where only one link is used."""
MIDDLE, WIDE = "1/3", "wide"
SIZES = (512, 2048, PREFIX)
"""Prefixes whose lone load and lone prefill are measured, tokens."""
_own, _new = count(2_000_000_000), count(5_000_000)


@dataclass(frozen=True)
class Workload:
    """Attributes:
    part: what it is measured by, a command of its own.
    link: one of SHARES, or WIDE (unshaped).
    jobs: (prefixes, tokens of each, requests that wait for each) for the bound; () where there is none.
    groups: name -> the requests whose figures are also given apart.
    decoding: requests whose times between tokens are the figure.
    warm: the local cache keeps what the first, unrecorded round has brought.
    equal: nothing can be gained, so that more pairs are run until that is shown, or the time is over.
    quick: in the short run.
    """

    name: str
    part: str
    why: str
    load: Load
    fill: Load
    link: str = MIDDLE
    jobs: tuple[tuple[int, int, int], ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    decoding: tuple[int, ...] = ()
    warm: bool = False
    equal: bool = False
    quick: bool = False


def _ids(prefix: int, tokens: int = PREFIX) -> range:
    """The chunks of one prefix; different prefixes share none."""
    return range(prefix * 1000, prefix * 1000 + tokens // CHUNK)


def _row(at_s: float, shared: Iterable[int], own: int = OWN, output: int = OUTPUT) -> dict[str, Any]:
    """A request: what is stored, and `own` tokens that are nobody else's, too few to be stored."""
    ids = list(shared)
    length = len(ids) * CHUNK + own
    return {
        "timestamp": round(at_s, 4),
        "input_length": length,
        "output_length": output,
        "hash_ids": [*ids, next(_own)],
    }


def load(name: str, prompts: Iterable[tuple[float, Iterable[int]]]) -> Load:
    return Load(name, tuple(_row(at_s, ids) for at_s, ids in prompts))


def stored(sizes: Sequence[int], name: str = "stored") -> Load:
    """One request for a prefix of each of these sizes, all in the store, for lone loads."""
    return load(name, ((0.0, _ids(700 + i, tokens)) for i, tokens in enumerate(sizes)))


def new(sizes: Sequence[int]) -> Load:
    """One request of each size that nobody has ever sent, for lone prefills."""
    return load(f"new-{next(_own)}", ((0.0, _ids(next(_new), tokens)) for tokens in sizes))


def again(requests: int) -> Load:
    """The same prefix for each: the first loads it, the others have it."""
    return load("again", ((0.0, _ids(700)) for _ in range(requests)))


UNIQUE = range(500, 516)
_FILL = load("fill", ((0.0, _ids(prefix)) for prefix in UNIQUE))


def unique() -> Iterator[Workload]:
    rows = load("unique", ((0.0, _ids(prefix)) for prefix in UNIQUE))
    for share in SHARES:
        why = f"16 different prefixes of {PREFIX:,} tokens at one moment; a load takes {share} of a prefill"
        jobs = ((len(UNIQUE), PREFIX, 1),)
        yield Workload(f"unique, {share}", "unique", why, rows, _FILL, share, jobs, quick=share == MIDDLE)


def mixed() -> Iterator[Workload]:
    """One request for the prefix that half of them share, one for another, and so on."""
    order = [prefix for own in UNIQUE[1:9] for prefix in (UNIQUE[0], own)]
    rows = load("mixed", ((0.0, _ids(prefix)) for prefix in order))
    groups = {"shared": tuple(range(0, 16, 2)), "unique": tuple(range(1, 16, 2))}
    for share in SHARES:
        why = f"8 requests for one prefix among 8 for different ones; a load takes {share} of a prefill"
        jobs = ((1, PREFIX, 8), (8, PREFIX, 1))
        yield Workload(
            f"mixed, {share}", "mixed", why, rows, _FILL, share, jobs, groups, quick=share == MIDDLE
        )


def decode(requests: int = 16, output: int = 480, every_s: float = 0.25) -> Iterator[Workload]:
    """The decodes are under way when the first prefix comes, and most of them after the last."""
    running = [_row(0.0, (), own=24, output=output) for _ in range(requests)]
    coming = [_row(0.8 + i * every_s, _ids(UNIQUE[i])) for i in range(8)]
    yield Workload(
        "decodes and cold prefixes",
        "decode",
        f"{requests} requests decode {output} tokens each; every {every_s:g} s comes a prefix of {PREFIX:,}",
        Load("decode", (*running, *coming)),
        _FILL,
        groups={"cold": tuple(range(requests, requests + len(coming)))},
        decoding=tuple(range(requests)),
        quick=True,
    )


def traces(folder: Path, seconds: float = 5.0) -> Iterator[Workload]:
    """Slices of the public traces that last so long, from their start, faster than recorded. A trace that is
    not there has none."""
    for kind in ("conversation", "synthetic"):
        path = folder / f"{kind}_trace.jsonl"
        if not path.exists():
            continue
        slices = {speed: trace(path, seconds * speed, speed) for speed in (2.0, 4.0)}
        longest = trace(path, seconds * 4.0)
        fill = Load(f"{kind}-fill", tuple({**row, "timestamp": 0.0} for row in longest.rows))
        for speed, rows in slices.items():
            why = f"the first {seconds * speed:g} s of the {kind} trace, {speed:g} times as fast, tokens / 8"
            yield Workload(f"{kind}, x{speed:g}", "traces", why, rows, fill)


def wide(bursts: int = 4, fan_out: int = 4) -> Iterator[Workload]:
    """Different prefixes, few at a time, over a link on which the last of them is loaded before one is
    computed."""
    rows = load(
        "wide", ((i // fan_out * 0.7, _ids(prefix)) for i, prefix in enumerate(UNIQUE[: bursts * fan_out]))
    )
    yield Workload(
        "no sharing, wide link",
        "equal",
        f"{fan_out} different prefixes at one moment, {bursts} times, unshaped: computing never pays",
        rows,
        _FILL,
        WIDE,
        equal=True,
        quick=True,
    )


def equal() -> Iterator[Workload]:
    """Where nothing can be gained."""
    yield from wide()
    rows = load("lone", ((i * 0.55, _ids(prefix)) for i, prefix in enumerate(UNIQUE[:8])))
    why = "8 different prefixes, one after the other, each alone; a load takes 1/3 of a prefill"
    yield Workload("lone requests", "equal", why, rows, _FILL, equal=True)
    rows = load("warm", ((i * 0.05, _ids(UNIQUE[0])) for i in range(32)))
    why = "32 requests, one every 50 ms, for a prefix that is local"
    yield Workload("all warm", "equal", why, rows, _FILL, warm=True, equal=True)


def sizes() -> Iterator[Workload]:
    """First those that take long: under first come, first served, 12 requests wait for 4."""
    long = [(600 + i, PREFIX) for i in range(4)]
    cohort = [(610, 2048)] * 6
    short = [(620 + i, 512) for i in range(6)]
    late = cohort + short
    random.Random(7).shuffle(late)
    prompts = [*long, *late]
    fill = load("sizes-fill", ((0.0, _ids(*prompt)) for prompt in dict.fromkeys(prompts)))
    groups = {
        name: tuple(i for i, prompt in enumerate(prompts) if prompt in of)
        for name, of in (("long", long), ("cohort", cohort), ("short", short))
    }
    for share in ("1", MIDDLE):
        yield Workload(
            f"mixed sizes, {share}",
            "sizes",
            "4 prefixes of 4,096 tokens, then 6 requests for one of 2,048 and 6 for different ones of 512;"
            f" a load takes {share} of a prefill",
            load("sizes", ((0.0, _ids(*prompt)) for prompt in prompts)),
            fill,
            share,
            ((4, PREFIX, 1), (1, 2048, 6), (6, 512, 1)),
            groups,
            quick=share == MIDDLE,
        )


PARTS = ("unique", "mixed", "decode", "traces", "equal", "sizes")


def of(part: str, folder: Path, quick: bool) -> list[Workload]:
    """A part's workloads. Args: folder: of the traces."""
    makers = {
        "unique": unique,
        "mixed": mixed,
        "decode": decode,
        "traces": lambda: traces(folder),
        "equal": equal,
        "sizes": sizes,
    }
    return [each for each in makers[part]() if each.quick or not quick]
