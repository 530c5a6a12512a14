"""The code blocks of README and docs, as a Markdown parser finds them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: .+ -->")


@dataclass(frozen=True)
class Block:
    """A code block, fenced or indented.

    Attributes:
        at: file:line. language: the word after the fence, or "". text: without fence and indentation.
    """

    at: str
    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each line that is a shell command, comments gone; a quoted one may go over lines."""
        found, lines = [], self.text.replace("\\\n", " ").splitlines()
        while lines:
            for last in range(1, len(lines) + 1):
                try:
                    words = shlex.split("\n".join(lines[:last]), comments=True)
                except ValueError:  # a quote is open; it may close on a later line
                    continue
                break
            else:
                words, last = [], 1  # not a command
            found += [words] if words else []
            del lines[:last]
        return found


def blocks(*languages: str) -> list[Block]:
    """All blocks of these languages ("": none was named), less those after `<!-- not run: the reason -->`."""
    found = []
    for page in PAGES:
        left_out = False
        for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
            if token.type in ("fence", "code_block") and token.info.strip() in languages and not left_out:
                at = f"{page.relative_to(ROOT)}:{(token.map or [0])[0] + 1}"
                found.append(Block(at, token.info.strip(), token.content))
            left_out = token.type == "html_block" and bool(NOT_RUN.match(token.content))
    return found


def inline_code() -> list[Block]:
    """All code within sentences and tables, one block each."""
    found = []
    for page in PAGES:
        for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
            for child in token.children or ():
                if child.type == "code_inline":
                    at = f"{page.relative_to(ROOT)}:{(token.map or [0])[0] + 1}"
                    found.append(Block(at, "", child.content))
    return found
