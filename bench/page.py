"""Tables that a command writes into a page of the docs, between two marks."""

from __future__ import annotations


def replaced(page: str, begin: str, end: str, tables: str) -> str:
    """The page with what is between the marks replaced. ValueError: a mark is missing."""
    before, begins, rest = page.partition(begin)
    _, ends, after = rest.partition(end)
    if not (begins and ends):
        raise ValueError(f"the page has no {end if begins else begin!r}")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"
