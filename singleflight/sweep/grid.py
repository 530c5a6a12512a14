"""The grid of a sweep, its tasks, and the work of one task."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from singleflight.sim.config import DEFAULT_WARMUP, LOOKUPS, ROUTINGS, Config, Lookup, Routing

TASK_LOOKUPS = 10_000_000
"""Block lookups worth a task of their own: a fifth of a second, so that sending it costs nothing beside
it."""


@dataclass(frozen=True)
class Grid:
    """The axes of a sweep; the defaults are the published grid, 420 configurations.

    Attributes:
        windows: W, ms. instances: N. capacities: C, blocks. routings, lookups: R3, R9. warmup: R2.
    """

    windows: tuple[int, ...] = (10, 30, 100, 300, 1000, 3000, 10000)
    instances: tuple[int, ...] = (1, 2, 4, 8, 16)
    capacities: tuple[int, ...] = (1000, 10000, 100000)
    routings: tuple[Routing, ...] = ROUTINGS
    lookups: tuple[Lookup, ...] = LOOKUPS
    warmup: tuple[int, int] = DEFAULT_WARMUP

    def __post_init__(self) -> None:
        for name, axis in (
            ("window", self.windows),
            ("instances", self.instances),
            ("capacity", self.capacities),
        ):
            if len(set(axis)) != len(axis) or not axis:
                raise ValueError(f"{name} axis {axis}; accepted: one value or more, each once")
        for name, given, known in (
            ("routing", self.routings, ROUTINGS),
            ("lookup", self.lookups, LOOKUPS),
        ):
            if not given or len(set(given)) != len(given) or not set(given) <= set(known):
                raise ValueError(f"{name} axis {', '.join(given)}; accepted: {', '.join(known)}, each once")
        # The published order, whatever order the axes were given in.
        for name in ("windows", "instances", "capacities"):
            object.__setattr__(self, name, tuple(sorted(getattr(self, name))))
        object.__setattr__(self, "routings", tuple(r for r in ROUTINGS if r in self.routings))
        object.__setattr__(self, "lookups", tuple(k for k in LOOKUPS if k in self.lookups))
        self.configs()  # every value in range

    def configs(self) -> list[Config]:
        """Every configuration, sorted by window, instances, capacity, routing, lookup, the last fastest."""
        axes = itertools.product(self.windows, self.instances, self.capacities, self.routings, self.lookups)
        return [Config(*point, warmup=self.warmup) for point in axes]


@dataclass(frozen=True)
class Task:
    """Configurations of one trace that share instances, routing and warmup, and so one layout."""

    trace: int
    configs: tuple[Config, ...]


def tasks(trace: int, wanted: Sequence[Config], n_lookups: int) -> Iterator[Task]:
    """Split the wanted configurations of one trace (`n_lookups` block lookups) into tasks of a useful
    size."""

    def layout(config: Config) -> tuple[int, Routing, tuple[int, int]]:
        return config.instances, config.routing, config.warmup

    for _, group in itertools.groupby(sorted(wanted, key=layout), layout):
        configs = list(group)
        pieces = max(1, min(len(configs), round(len(configs) * n_lookups / TASK_LOOKUPS)))
        for i in range(pieces):
            piece = configs[len(configs) * i // pieces : len(configs) * (i + 1) // pieces]
            yield Task(trace, tuple(piece))


@cache
def code_version() -> str:
    """Digest of the code that decides the counts; results of another version are not reused."""
    digest = hashlib.sha256()
    for package, name in (
        ("sim", "columns.py"),
        ("sim", "config.py"),
        ("sim", "counts.py"),
        ("sweep", "grid.py"),
        ("sim", "kernel.py"),
    ):
        digest.update(resources.files(f"singleflight.{package}").joinpath(name).read_bytes())
    return digest.hexdigest()[:16]
