"""Mutants of a file: cosmic-ray's operators, and the deletion of one statement."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Swaps that change what the code does. Others (`<` to `is`, `+` to `**`) are noticed by whatever runs them.
COMPARISONS = ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Is_IsNot", "IsNot_Is")
ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul")
OPERATORS = (
    *(f"core/ReplaceComparisonOperator_{swap}" for swap in COMPARISONS),
    *(f"core/ReplaceBinaryOperator_{swap}" for swap in ARITHMETIC),
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/AddNot",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/NumberReplacer",
    "core/ZeroIterationForLoop",
)


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    """Path from the repository's root."""
    operator: str
    line: int
    """Of the file as it is."""
    was: str
    becomes: str
    source: str
    """The whole file with the change in it."""


def mutants(root: Path, file: str) -> list[Mutant]:
    """All mutants of a file that compile, in the order of their lines; no two are the same."""
    source = (root / file).read_text()
    found: dict[str, Mutant] = {}
    for operator, changed in (*_by_cosmic_ray(source), *_deletions(source)):
        if changed == source or changed in found:
            continue
        try:
            same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
        except SyntaxError:
            continue
        line, was, becomes = _difference(source, changed)
        if not same and "TYPE_CHECKING" not in was:
            found[changed] = Mutant(file, operator, line, was, becomes, changed)
    return sorted(found.values(), key=lambda mutant: (mutant.line, mutant.operator))


def sample(all_of_them: list[Mutant], most: int, seed: int) -> list[Mutant]:
    """At most so many, the same ones for the same seed."""
    if len(all_of_them) <= most:
        return all_of_them
    chosen = random.Random(seed).sample(range(len(all_of_them)), most)
    return [all_of_them[index] for index in sorted(chosen)]


def _by_cosmic_ray(source: str) -> Iterator[tuple[str, str]]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    for name in OPERATORS:
        operator, occurrence = get_operator(name)(), 0
        while (changed := mutate_code(source, operator, occurrence)) is not None:
            yield name.removeprefix("core/"), changed
            occurrence += 1


def _deletions(source: str) -> Iterator[tuple[str, str]]:
    """A call whose result nobody takes, an assignment to an attribute or an item, a `del`: gone."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        stored = isinstance(node, ast.Assign | ast.AugAssign) and any(
            isinstance(target, ast.Attribute | ast.Subscript)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
        if call or stored or isinstance(node, ast.Delete):
            assert isinstance(node, ast.stmt)
            assert node.end_lineno is not None
            gone = " " * node.col_offset + "pass\n"
            yield "DeleteStatement", "".join([*lines[: node.lineno - 1], gone, *lines[node.end_lineno :]])


def _difference(source: str, changed: str) -> tuple[int, str, str]:
    """The first line that differs, as it was and as it becomes."""
    for number, (was, becomes) in enumerate(zip(source.splitlines(), changed.splitlines(), strict=False), 1):
        if was != becomes:
            return number, was.strip(), becomes.strip()
    raise AssertionError("the same source")
