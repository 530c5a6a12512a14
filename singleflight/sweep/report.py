"""What a person reads in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

from rich.console import Console
from rich.table import Table

from singleflight.sim.config import PHASES
from singleflight.sim.counts import Counts, Outcome
from singleflight.sim.gaps import GapStatistics
from singleflight.sweep.summary import Summary, WindowRow

HOT = Fraction(3, 2)
"""Imbalance from which on affinity's redundancy cannot be told from its hot spots."""


def window_label(ms: int) -> str:
    """A window in the largest unit that keeps it short: ``300 ms``, ``3 s``, ``10 min``, ``1 h``."""
    for size, unit in ((3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms} ms"


def percent(share: Fraction) -> str:
    """Six decimals of a percent, as the table was published."""
    return f"{float(100 * share):.6f} %"


def small(value: Fraction) -> str:
    """A difference of shares: six decimals, or three digits where those would be zeros."""
    number = float(value)
    if number == 0 or number >= 1e-4:
        return f"{number:.6f}"
    mantissa, _, exponent = f"{number:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def ratio(value: Fraction) -> str:
    return f"{float(value):.1f}" if value >= 10 else f"{float(value):.2f}"


def window_table(name: str, summary: Summary) -> Table:
    """The published table of a trace; neighbouring windows that agree in every figure share a row."""
    table = Table("W", title=f"{name}, steady phase", title_justify="left")
    for heading in ("median redundancy", "max", "max fan-in", "rows with p99 fan-in > 1"):
        table.add_column(heading, justify="right")
    for _, run in groupby(summary.windows, key=_figures):
        rows = list(run)
        row = rows[-1]
        last = window_label(row.w_eff_ms)
        label = last
        if len(rows) > 1:
            first = window_label(rows[0].w_eff_ms)
            label = f"<= {last}" if rows[0] is summary.windows[0] else f"{first} to {last}"
        above = f"{row.p99_above_1} of {row.rows}" if row.p99_above_1 else "0"
        table.add_row(label, percent(row.median), percent(row.high), str(row.max_fanin), above)
    return table


def _figures(row: WindowRow) -> tuple[Fraction, Fraction, int, int]:
    return row.median, row.high, row.max_fanin, row.p99_above_1


def sentences(summary: Summary, gaps: GapStatistics, windows: Sequence[int]) -> list[tuple[str, str]]:
    """(style, sentence) for what the table does not show."""
    said = []
    if summary.lookup_difference is not None:
        said.append(("", f"Largest difference between the lookups: {small(summary.lookup_difference)}."))
    if summary.affinity is not None:
        above, equal, below = summary.affinity
        said.append(
            (
                "",
                f"Affinity above / equal / below round-robin: {above} / {equal} / {below} "
                f"of {above + equal + below} pairs.",
            )
        )
    at = summary.imbalance_at
    said.append(
        (
            "",
            f"Largest imbalance (max / mean requests an instance): {ratio(summary.imbalance)}, "
            f"{at.routing} over {at.instances} instances.",
        )
    )
    if summary.imbalance >= HOT and summary.affinity is not None:
        said.append(
            (
                "yellow",
                "Warning: affinity overloads instances here; its redundancy and its hot spots are "
                "inseparable.",
            )
        )
    quantiles = ", ".join(f"p{q} {window_label(ms)}" for q, ms in gaps.gap_ms.items())
    said.append(
        (
            "",
            f"Gaps: {gaps.reuses:,} of {gaps.lookups:,} lookups reuse a block ({quantiles or 'none'}); "
            f"requests come at {gaps.instants:,} instants, up to {gaps.ties} at once.",
        )
    )
    within = ", ".join(
        f"{window_label(w)} {percent(Fraction(gaps.within[w], gaps.lookups))}" for w in windows
    )
    said.append(("", f"Lookups that reuse within a window (no configuration can coalesce more): {within}."))
    return said


def outcome_table(outcome: Outcome) -> Table:
    """The counts of one configuration: both phases, and the steady phase of each instance."""
    config = outcome.config
    table = Table(
        "count",
        title=f"W {window_label(config.w_eff_ms)}, {config.instances} instances of {config.capacity:,} "
        f"blocks, {config.routing}, {config.lookup}",
        title_justify="left",
    )
    phases = [outcome.phase(phase) for phase in PHASES]
    columns = [("warmup", phases[0]), ("steady", phases[1])]
    if 1 < config.instances <= 4:
        columns += [(f"steady, {i}", each["steady"]) for i, each in enumerate(outcome.instances)]
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for name in Counts._fields:
        table.add_row(name, *(f"{getattr(counts, name):,}" for _, counts in columns))
    table.add_row("redundancy", *(percent(counts.redundancy) for _, counts in columns), style="bold")
    return table


def print_summary(
    console: Console, summaries: dict[str, Summary], gaps: dict[str, GapStatistics], windows: Sequence[int]
) -> None:
    """Print the table and the sentences of every trace."""
    for name, summary in summaries.items():
        console.print(window_table(name, summary))
        for style, sentence in sentences(summary, gaps[name], windows):
            console.print(sentence, style=style, highlight=False)
        console.print()
