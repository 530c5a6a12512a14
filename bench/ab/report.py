"""`report.html`: the sentences, the pictures, and one table."""

from __future__ import annotations

from html import escape
from pathlib import Path

from bench.ab import plots
from bench.ab.results import CellResult, Results, words
from bench.ab.rounds import BOUND
from bench.ab.servers import STOCK
from bench.ab.statistics import Ratio
from singleflight.stack.demo import replace_file

SECTION = "lmcache.html"
"""What a run against LMCache has written for this folder's page (`lmcache.py`)."""
BEGIN, END = "<!-- another store -->", "<!-- end -->"
STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:3px 8px;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}.loss{color:#b00;font-weight:bold}"
    "img{max-width:100%}small{color:#666}"
)
PICTURES = {
    "ratios.png": (plots.ratios, "Ratio to stock, with 95 % paired bootstrap intervals. Dotted: 1.02."),
    "cdfs.png": (plots.cdfs, "Time to first token of all requests of all rounds."),
    "resources.png": (plots.resources, "What a round takes from the store, against stock."),
}


def write(results: Results, folder: Path) -> None:
    """results.json, and what is drawn and said from it."""
    results.write(folder / "results.json")
    if not results.cells:
        return
    for name, (draw, _) in PICTURES.items():
        draw(folder / name, results.cells)
    page = _page(results)
    other = folder / SECTION
    if other.exists():
        page = with_section(page, other.read_text())
    replace_file(folder / "report.html", lambda scratch: scratch.write_text(page))


def _page(results: Results) -> str:
    says = "".join(f"<p>{escape(sentence)}</p>" for sentence in (results.link, *words(results)))
    pictures = "".join(
        f'<h2>{escape(text)}</h2><img src="{name}" alt="{escape(text)}">'
        for name, (_, text) in PICTURES.items()
    )
    cold = [c for c in results.cells if not c.cell.warm]
    warm = [c for c in results.cells if c.cell.warm]
    tables = "".join(
        f"<h2>{title}</h2>{_table(cells)}"
        for title, cells in (("Cold: prefix cache empty, all in the store", cold), ("Warm", warm))
        if cells
    )
    return page_of(
        f"<h1>A/B time to first token, {escape(results.started)}</h1>{says}{pictures}{tables}{_run(results)}"
    )


def _run(results: Results) -> str:
    facts = "".join(f"<li>{escape(k)}: {escape(v)}</li>" for k, v in results.environment.items())
    command = f"<code>{escape(results.command)}</code>, {results.minutes:.0f} minutes"
    return f"<h2>Run</h2><p>{command}</p><ul>{facts}</ul>"


def page_of(body: str) -> str:
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>A/B time to first token</title>"
        f"<style>{STYLE}</style>{body}</html>\n"
    )


def section(title: str, results: Results) -> str:
    """A part of a page: another store's sentences, table and run."""
    says = "".join(f"<p>{escape(sentence)}</p>" for sentence in (results.link, *words(results)))
    table = _table(results.cells) if results.cells else ""
    return f"{BEGIN}<h1>{escape(title)}, {escape(results.started)}</h1>{says}{table}{_run(results)}{END}"


def with_section(page: str, section: str) -> str:
    """The page with that part at its end, in the place of an older one."""
    before, found, rest = page.partition(BEGIN)
    if found:
        return before + section + rest.partition(END)[2]
    return page.replace("</html>", f"{section}</html>")


def _table(cells: list[CellResult]) -> str:
    head = "<tr><th>workload<th>arm<th>pairs<th>median, s<th>ratio<th>p99, s<th>ratio<th>max, s<th>ratio"
    head += "<th>Gets<th>MB</tr>"
    rows = []
    for c in cells:
        for number, arm in enumerate(c.arms):
            name = f"{escape(c.cell.name)}<br><small>{escape(c.cell.why)}</small>" if number == 0 else ""
            row = f"<tr><td>{name}<td>{arm}<td>{len(c.of(arm))}"
            for measure in ("median_s", "p99_s", "max_s"):
                row += f"<td>{c.middle(arm, measure):.3f}<td>"
                row += "" if arm == STOCK else _ratio(c.ratio(arm, measure))
            if arm == BOUND:
                row += "<td><td>"
            else:
                row += f"<td>{c.count(arm, 'gets'):.0f}<td>{c.count(arm, 'get_bytes') / 1e6:.1f}"
            rows.append(row + "</tr>")
    return f"<table>{head}{''.join(rows)}</table>"


def _ratio(r: Ratio) -> str:
    interval = f" ({r.low:.2f}-{r.high:.2f})" if r.pairs > 1 else ""
    return f'<span class="{"loss" if r.is_loss else ""}">{r.value:.2f}{interval}</span>'
