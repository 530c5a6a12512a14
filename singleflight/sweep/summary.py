"""The published table and comparisons, from the outcomes of one trace. All exact: fractions until they are
printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import median
from typing import Any

from singleflight.sim.config import Config
from singleflight.sim.counts import Counts, Outcome


@dataclass(frozen=True)
class WindowRow:
    """All steady rows of one window, over instances, capacities, routings and lookups.

    Attributes:
        w_eff_ms: the window, ms.
        median, low, high: of redundancy (R12); the median of an even number of rows is the mean of the
            middle two.
        max_fanin: the largest of any row.
        p99_above_1: rows with p99 fan-in above 1.
        rows: how many there are.
    """

    w_eff_ms: int
    median: Fraction
    low: Fraction
    high: Fraction
    max_fanin: int
    p99_above_1: int
    rows: int


@dataclass(frozen=True)
class Summary:
    """What a sweep says about one trace; steady phase throughout.

    Attributes:
        windows: one row a window.
        lookup_difference: largest difference in redundancy between the lookups, all else equal; None
            without both.
        affinity: (above, equal, below): configurations whose redundancy under affinity is above, equal to
            or below that under round-robin, all else equal; None without both routings.
        imbalance: largest over mean requests an instance, the largest of any configuration.
        imbalance_at: the configuration it is from.
    """

    windows: tuple[WindowRow, ...]
    lookup_difference: Fraction | None
    affinity: tuple[int, int, int] | None
    imbalance: Fraction
    imbalance_at: Config

    def as_json(self) -> dict[str, Any]:
        return {
            "windows": [
                {
                    "w_eff_ms": row.w_eff_ms,
                    "median_redundancy": float(row.median),
                    "min_redundancy": float(row.low),
                    "max_redundancy": float(row.high),
                    "max_fanin": row.max_fanin,
                    "rows_p99_fanin_above_1": row.p99_above_1,
                    "rows": row.rows,
                }
                for row in self.windows
            ],
            "max_lookup_difference": None
            if self.lookup_difference is None
            else float(self.lookup_difference),
            "affinity_vs_round_robin": self.affinity
            and dict(zip(("above", "equal", "below"), self.affinity, strict=True)),
            "max_imbalance": float(self.imbalance),
            "max_imbalance_config": self.imbalance_at.as_json(),
        }


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """Summarise the outcomes of one trace, one a configuration of a full grid."""
    steady = {outcome.config: outcome.phase("steady") for outcome in outcomes}
    worst = max(outcomes, key=lambda outcome: outcome.imbalance)
    differences = [
        abs(one.redundancy - other.redundancy)
        for one, other in _pairs(steady, lookup=("contiguous_prefix", "independent_blocks"))
    ]
    signs = [
        (one.redundancy > other.redundancy) - (one.redundancy < other.redundancy)
        for one, other in _pairs(steady, routing=("affinity", "round_robin"))
    ]
    return Summary(
        windows=tuple(
            _window_row(window, [row for config, row in steady.items() if config.w_eff_ms == window])
            for window in sorted({config.w_eff_ms for config in steady})
        ),
        lookup_difference=max(differences, default=None),
        affinity=(signs.count(1), signs.count(0), signs.count(-1)) if signs else None,
        imbalance=worst.imbalance,
        imbalance_at=worst.config,
    )


def _window_row(window: int, rows: list[Counts]) -> WindowRow:
    redundancy = [row.redundancy for row in rows]
    return WindowRow(
        window,
        median(redundancy),
        min(redundancy),
        max(redundancy),
        max(row.max_fanin for row in rows),
        sum(row.p99_fanin > 1 for row in rows),
        len(rows),
    )


def _pairs(steady: dict[Config, Counts], **axis: tuple[str, str]) -> list[tuple[Counts, Counts]]:
    """Rows that differ in one axis only: (with the axis' first value, with its second)."""
    ((name, (first, second)),) = axis.items()
    changes: dict[str, Any] = {name: second}
    pairs = []
    for config, row in steady.items():
        other = steady.get(replace(config, **changes))
        if getattr(config, name) == first and other is not None:
            pairs.append((row, other))
    return pairs
