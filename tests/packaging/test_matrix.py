"""The compatibility matrix says nothing that no test shows."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from connector_patch.matrix import ALL, ROWS, Row

ROOT = Path(__file__).parents[2]


@cache
def names_in(path: str) -> set[str]:
    """`name` and `Class::name` of each test in the file."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        found |= {prefix + each.name for each in inside if isinstance(each, kinds)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_shown_by_tests_that_are_there(row: Row) -> None:
    assert row.shown_by
    for test in row.shown_by:
        path, _, name = test.partition("::")
        assert name in names_in(path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_that_passes_through_somewhere_has_a_reason(row: Row) -> None:
    assert set(row.on) <= set(ALL)
    assert bool(row.reason) == (set(row.on) < set(ALL))


def test_no_two_rows_have_one_name() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_matrix_can_be_read_where_there_is_no_vllm() -> None:
    said = "import connector_patch.compat, sys; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], cwd=ROOT).returncode == 0
