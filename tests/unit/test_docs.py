"""Pages that are made from code stay as the code is."""

from __future__ import annotations

from pathlib import Path

from singleflight.flight import diagram

DOCS = Path(__file__).parents[2] / "docs"


def test_the_diagram_in_the_design_is_the_transition_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in (DOCS / "design.md").read_text()
