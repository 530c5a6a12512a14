"""`{mermaid}`: the picture of a Mermaid diagram, drawn beforehand: a page needs no network and no script.

`make diagrams` draws what has no picture yet. A picture's name is a digest of the diagram's text: one that
has changed has no picture, and the build says so.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

PICTURES = "img/diagrams"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def picture_name(diagram: str) -> str:
    """The file, under `PICTURES`, of a diagram's picture."""
    return hashlib.sha256(diagram.strip().encode()).hexdigest()[:16] + ".svg"


def diagrams(docs: Path) -> dict[str, str]:
    """picture's name -> text, for each diagram on a page under `docs`."""
    pages = sorted(docs.rglob("*.md"))
    texts = [text for page in pages for text in FENCE.findall(page.read_text(encoding="utf-8"))]
    return {picture_name(text): text for text in texts}


class Mermaid(SphinxDirective):
    """The picture, or, with a warning, the text."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        diagram = "\n".join(self.content)
        relative = f"{PICTURES}/{picture_name(diagram)}"
        if (Path(self.env.srcdir) / relative).exists():
            kind = diagram.split(None, 1)[0]
            return [nodes.image(uri=f"/{relative}", alt=f"Diagram ({kind})", classes=["diagram"])]
        logging.getLogger(__name__).warning(
            "%s does not exist: this diagram is new or has changed; draw it with `make diagrams`",
            relative,
            location=self.get_location(),
        )
        return [nodes.literal_block(diagram, diagram)]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True}
