"""`{matrix}`: the compatibility matrix, from the table that the connector itself walks over."""

from __future__ import annotations

import inspect
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from connector_patch import matrix

PARTS = {
    "Deployments": matrix.DEPLOYMENT,
    "What SingleFlightConnector wraps": matrix.WRAPPED,
    "vLLM itself": matrix.VLLM,
    "What vLLM binds at start-up": matrix.BOUND,
}


def table(rows: tuple[matrix.Row, ...]) -> str:
    """As Markdown. What a reason fills in is shown as "…"."""
    modes = [mode.value for mode in matrix.ALL]
    lines = [f"| | {' | '.join(modes)} | reason | shown by |", f"|{'---|' * (len(modes) + 3)}"]
    for row in rows:
        cells = ["supported" if mode in row.on else "passes through" for mode in matrix.ALL]
        tests = ", ".join(f"`{test.rpartition('::')[2]}`" for test in row.shown_by)
        lines.append(f"| {' | '.join([row.name, *cells, row.reason.format('…'), tests])} |")
    return "\n".join(lines)


class Matrix(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(inspect.getfile(matrix))
        text = "\n\n".join(f"**{title}**\n\n{table(rows)}" for title, rows in PARTS.items())
        return self.parse_text_to_nodes(text)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("matrix", Matrix)
    return {"parallel_read_safe": True}
