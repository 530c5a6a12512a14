"""Pages that are made from code stay as the code is."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from singleflight.core.flight import diagram

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def house() -> str:
    """The folders and the connector's modules from the top down, as the layers contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = []
    for layer in contracts[0]["layers"]:
        for name in layer.split(" | "):
            path = ROOT / name.replace(".", "/")
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            says = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
            rows.append(
                (f"{path.relative_to(ROOT)}/" if path.is_dir() else f"{source.relative_to(ROOT)}", says)
            )
        rows.append(("", ""))
    width = max(len(where) for where, _ in rows)
    return "\n".join(f"{where:{width}}  {says}".rstrip() for where, says in rows[:-1])


def test_the_folders_in_the_design_are_the_layers_that_imports_are_held_to() -> None:
    assert f"```text\n{house()}\n```" in (DOCS / "design.md").read_text()


def test_every_folder_of_code_is_in_the_picture() -> None:
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in ROOT.glob("singleflight/*/__init__.py")}
    modules = {f"{path.relative_to(ROOT)}" for path in ROOT.glob("connector_patch/[!_]*.py")}
    assert [name for name in sorted(folders | modules) if f"\n{name}" not in f"\n{house()}"] == []


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
