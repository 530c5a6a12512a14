"""Rows of the comparison, what they are judged by, and the tables in docs/gate.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bench.ab.statistics import Difference
from bench.gate.workloads import PARTS

MODES = ("stock", "attach")
CLOSE, FAR = 0.15, 0.30
"""Of the measured mean TTFT: most predictions are to be within the one, all within the other."""
MOST = 10 / 12
COUNTS = 0.05
"""Of the removable blocks that were counted."""
BEGIN, END = "<!-- bench.gate.compare writes from here -->", "<!-- to here -->"


@dataclass(frozen=True)
class Row:
    """One workload. Pairs are (measured, predicted).

    Attributes:
        measured: mode -> the median over rounds of a round's mean TTFT, s. predicted: mode -> mean TTFT, s.
        saved: stock less attach, mean TTFT of a pair of rounds, s.
        removable: block loads that shadow mode counted in stock rounds. adopted: in attach rounds.
        gets, megabytes: mode -> what the store was asked for.
        figures: what the twin was given. defaults: the names of those that are not measured.
    """

    part: str
    name: str
    requests: int
    engines: int
    measured: dict[str, float]
    predicted: dict[str, float]
    saved: Difference
    removable: tuple[float, float]
    adopted: tuple[float, float]
    gets: dict[str, tuple[float, float]]
    megabytes: dict[str, tuple[float, float]]
    figures: dict[str, float]
    defaults: list[str]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Row:
        """From its JSON."""
        return cls(**{**document, "saved": Difference(**document["saved"])})

    def error(self, mode: str) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted[mode] / self.measured[mode] - 1

    def within(self, share: float) -> bool:
        """Whether both modes' predictions are."""
        return all(abs(self.error(mode)) <= share for mode in MODES)

    @property
    def predicted_saved(self) -> float:
        return self.predicted["stock"] - self.predicted["attach"]

    @property
    def sign_agrees(self) -> bool | None:
        """None: the measured interval has both signs, so there is nothing to agree with."""
        if self.saved.low <= 0 <= self.saved.high:
            return None
        return (self.predicted_saved > 0) == (self.saved.median > 0)

    @property
    def counts_agree(self) -> bool:
        return all(
            abs(told - counted) <= COUNTS * counted for counted, told in (self.removable, self.adopted)
        )


def verdict(rows: Sequence[Row]) -> list[str]:
    """One line for each thing that is asked of the predictions."""
    close, far = (sum(row.within(share) for row in rows) for share in (CLOSE, FAR))
    signs = [row.sign_agrees for row in rows if row.sign_agrees is not None]
    counts = sum(row.counts_agree for row in rows)
    n = len(rows)
    return [
        f"mean TTFT of both modes within {CLOSE:.0%}: {close} of {n} (asked: {math.ceil(MOST * n)})",
        f"within {FAR:.0%}: {far} of {n} (asked: {n})",
        f"sign right where the measured interval has one: {sum(signs)} of {len(signs)} (asked: {len(signs)})",
        f"removable and adopted blocks within {COUNTS:.0%} of counted: {counts} of {n} (asked: {n})",
    ]


def markdown(rows: Sequence[Row]) -> str:
    """A table and its verdict for each part."""
    parts = []
    for part, group in groupby(rows, key=lambda row: row.part):
        of = list(group)
        head = (
            "| workload | stock, s: measured / predicted | attach, s: measured / predicted |"
            " saved, ms: measured (95 %) / predicted | removable: counted / predicted |"
        )
        parts += [f"**The {part} part.**", "", head, "|---|---|---|---|---|", *map(_line, of), ""]
        parts += [*(f"- {line}" for line in verdict(of)), ""]
        defaults = sorted({f"`{name}`" for row in of for name in row.defaults})
        parts += [f"Figures at their defaults: {', '.join(defaults)}.", ""] if defaults else []
    missing = [part for part in PARTS if part not in {row.part for row in rows}]
    parts += [f"**The {part} part** is not measured yet." for part in missing]
    return "\n".join(parts).strip() + "\n"


def _line(row: Row) -> str:
    modes = (
        f"{row.measured[mode]:.3f} / {row.predicted[mode]:.3f} ({_bold(row.error(mode))})" for mode in MODES
    )
    low, high = 1000 * row.saved.low, 1000 * row.saved.high
    saved = f"{1000 * row.saved.median:.0f} ({low:.0f} to {high:.0f}) / {1000 * row.predicted_saved:.0f}"
    if row.sign_agrees is False:
        saved = f"**{saved}**"
    removable = f"{row.removable[0]:.0f} / {row.removable[1]:.0f}"
    if not row.counts_agree:
        removable = f"**{removable}** (adopted {row.adopted[0]:.0f} / {row.adopted[1]:.0f})"
    return f"| {row.name} | {' | '.join(modes)} | {saved} | {removable} |"


def _bold(error: float) -> str:
    """Misses stand out."""
    return f"**{error:+.0%}**" if abs(error) > CLOSE else f"{error:+.0%}"
