"""The bound: link and core are two machines, each serves requests at a rate of its own, both at once.

No policy that loads or computes each prefix as a whole has a lower mean; sharing is in it, since a prefix
that several requests wait for is one job whose end counts for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Jobs:
    """Equal ones.

    Attributes:
        count: how many. waiting: requests that wait for each.
        load_s, compute_s: how long each has the link, or the core, for itself.
    """

    count: int
    load_s: float
    compute_s: float
    waiting: int = 1


def least_mean_s(kinds: Sequence[Jobs]) -> float:
    """The least mean time, over requests, until their job is done, of all ways to divide them between both.

    On each machine jobs go by (requests waiting) / (time), which is optimal there (Smith's rule); every
    number of each kind is tried on the link. ValueError if there is no job.
    """
    requests = sum(kind.count * kind.waiting for kind in kinds)
    if not requests:
        raise ValueError("there is no job to do")
    best = float("inf")
    for loaded in itertools.product(*(range(kind.count + 1) for kind in kinds)):
        pairs = list(zip(kinds, loaded, strict=True))
        link = _total_s([(kind.load_s, kind.waiting, n) for kind, n in pairs])
        core = _total_s([(kind.compute_s, kind.waiting, kind.count - n) for kind, n in pairs])
        best = min(best, link + core)
    return best / requests


def loads_only_s(kinds: Sequence[Jobs]) -> float:
    """The least mean where nothing is computed: the link alone, in its best order."""
    requests = sum(kind.count * kind.waiting for kind in kinds)
    return _total_s([(kind.load_s, kind.waiting, kind.count) for kind in kinds]) / requests


def _total_s(jobs: list[tuple[float, int, int]]) -> float:
    """Of one machine in its best order: all requests' times together. Jobs: (seconds, waiting, count)."""
    now = total = 0.0
    for seconds, waiting, count in sorted(jobs, key=lambda job: job[0] / job[1]):
        # The i-th of equal jobs ends at now + i x seconds.
        total += waiting * (count * now + seconds * count * (count + 1) / 2)
        now += count * seconds
    return total
