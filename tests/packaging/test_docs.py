"""Pages that are made from code stay as the code is."""

from __future__ import annotations

import re
from pathlib import Path

from singleflight.flight import diagram

DOCS = Path(__file__).parents[2] / "docs"


def test_the_diagram_in_the_design_is_the_transition_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in (DOCS / "design.md").read_text()


def test_every_test_that_the_failure_modes_name_is_there() -> None:
    tests = "\n".join(path.read_text() for path in (DOCS.parent / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`((?:test_|Test)\w+)`", (DOCS / "failure-modes.md").read_text()))
    assert len(named) > 60
    assert [name for name in sorted(named) if not re.search(rf"(def|class) {name}\b", tests)] == []


def test_every_hazard_is_in_the_failure_modes() -> None:
    """The hazard list counts A to M; ranges such as M1-M8 count as what they span."""
    page = (DOCS / "failure-modes.md").read_text().partition("## By public report")[2]
    listed: set[str] = set()
    for first in re.findall(r"^\| ([A-M][^|]*) \|", page, re.MULTILINE):
        for item in first.split(", "):
            start, _, end = item.partition("-")
            last = int(end[1:]) if end else int(start[1:])
            listed |= {f"{start[0]}{n}" for n in range(int(start[1:]), last + 1)}
    counts = {"A": 7, "B": 4, "C": 6, "D": 7, "E": 9, "F": 8, "G": 5, "H": 10, "I": 5, "J": 4, "K": 4, "L": 4}
    counts["M"] = 8
    assert listed == {f"{letter}{n}" for letter, last in counts.items() for n in range(1, last + 1)}
