"""`{releases}`: what `make versions`, `make pythons` and `make vllm-tests` have found, as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parents[2] / "bench" / "results"
FILES = ("versions.json", "pythons.json", "vllm-tests.json")


def counts(found: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {outcome}" for outcome, number in found.items())


def of_versions(found: dict[str, Any]) -> str:
    """As Markdown: which modes are on with each release, and what has passed there."""
    lines = [
        "| vLLM | attach | park | shadow | tests without an engine | on an engine | simulated stories |",
        "|---|---|---|---|---|---|---|",
    ]
    for version, row in found.items():
        modes = [f"passes through: {reason}" if reason else "on" for reason in row["lacks"].values()]
        stories = ", ".join(
            f"{mode} {tally['stories']:,}" + (f" ({len(tally['failed'])} failed)" if tally["failed"] else "")
            for mode, tally in row["simulation"].items()
        )
        engine = counts(row["engine"]) if "engine" in row else row.get("no_engine", "not run")
        lines.append(f"| {' | '.join([version, *modes, counts(row['tests']), engine, stories])} |")
    return "\n".join(lines)


def of_pythons(found: dict[str, Any]) -> str:
    lines = ["| Python | tests of all that needs no vLLM |", "|---|---|"]
    return "\n".join([*lines, *(f"| {version} | {counts(row['tests'])} |" for version, row in found.items())])


def of_vllm_tests(found: dict[str, Any]) -> str:
    lines = [f"| vLLM {found['vllm']}'s own tests, with | |", "|---|---|"]
    names = {"stock": "the stock connector"}
    lines += [f"| {names.get(mode, f'ours, {mode}')} | {counts(n)} |" for mode, n in found["counts"].items()]
    worse = [f"- `{test}`: {found['by_design'].get(test, 'not as designed')}" for test in found["worse"]]
    files = ", ".join(f"`{test.removeprefix('tests/v1/')}`" for test in found["tests"])
    differs = (
        "\n".join(["These pass with the stock connector only:", "", *worse]) if worse else "No test differs."
    )
    return "\n".join([*lines, "", differs, "", f"Run were {files}."])


class Releases(SphinxDirective):
    """Its argument is one of `FILES`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = RESULTS / self.arguments[0]
        self.env.note_dependency(str(path))
        if not path.exists():
            return []  # not run yet
        table = dict(zip(FILES, (of_versions, of_pythons, of_vllm_tests), strict=True))[path.name]
        return self.parse_text_to_nodes(table(json.loads(path.read_text())))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("releases", Releases)
    return {"parallel_read_safe": True}
