"""What `trace inspect` says."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from singleflight.sim.columns import Columns
from singleflight.sim.gaps import statistics
from singleflight.sweep.grid import Grid
from singleflight.sweep.report import window_label
from singleflight.traces.reader import TraceReader


def describe(reader: TraceReader) -> dict[str, Any]:
    """Read a trace and describe it.

    Raises:
        TraceError: it cannot be read.
    """
    columns = Columns.from_requests(reader)
    gaps = statistics(columns, Grid().windows)
    span_s = (reader.last_ms - reader.first_ms) / 1000
    return {
        **reader.about(),
        "requests_per_s": reader.requests / span_s if span_s else None,
        **gaps.as_json(),
        "notices": reader.notices,
    }


def print_description(about: dict[str, Any]) -> None:
    """Print it for people."""
    rate = about["requests_per_s"]
    rows = {
        "SHA-256": about["sha256"],
        "format": f"{about['format']}, timestamps in {about['unit']}, {about['block_size']}-token blocks",
        "requests": f"{about['requests']:,} over {window_label(about['last_ms'] - about['first_ms'])}"
        + (f", {rate:.3g} a second" if rate else ""),
        "arrivals": f"{about['instants']:,} instants, up to {about['ties']} at once; gaps "
        + _quantiles(about["arrival_ms"]),
        "block lookups": f"{about['lookups']:,}, {about['distinct']:,} distinct, {about['reuses']:,} reuses",
        "reuse gaps": _quantiles(about["gap_ms"]),
        "reuse within W": ", ".join(f"{window_label(w)} {n:,}" for w, n in about["within"].items()),
    }
    table = Table(title=about["path"], title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a digest cut short is none
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _quantiles(of: dict[int, int]) -> str:
    return ", ".join(f"p{q} {window_label(ms)}" for q, ms in of.items()) or "none"
