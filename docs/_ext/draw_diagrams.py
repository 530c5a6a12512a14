"""`make diagrams`: draw the Mermaid diagrams of docs/ that have no picture, remove pictures of none.

Mermaid itself draws, from its npm package, in Chromium. Only this step needs a package registry; the pictures
are in the repository, so neither the build nor a page does.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import browser
from diagrams import PICTURES, diagrams

MERMAID = "mermaid@10.9.8"
"""11 and 12 draw two loops at one state on top of each other, and the design's diagram has such."""
SCRIPT = "package/dist/mermaid.min.js"
DRAW = """
const [text, done] = arguments;
mermaid.initialize({startOnLoad: false, theme: 'neutral', htmlLabels: false, flowchart: {htmlLabels: false},
  deterministicIds: true, fontFamily: 'sans-serif'});
mermaid.render('diagram', text).then(drawn => done(drawn.svg), fault => done('error: ' + fault));
"""


def main() -> None:
    docs = Path(__file__).parents[1]
    folder = docs / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    wanted = diagrams(docs)
    for picture in folder.glob("*.svg"):
        if picture.name not in wanted:
            picture.unlink()
            print(f"removed {picture}")
    todo = {name: text for name, text in wanted.items() if not (folder / name).exists()}
    if not todo:
        print("every diagram has its picture")
        return
    if says := browser.missing():
        sys.exit(f"error: {says}")
    with tempfile.TemporaryDirectory() as scratch, browser.chromium() as page:
        subprocess.run(
            ["npm", "pack", "--silent", MERMAID], cwd=scratch, check=True, stdout=subprocess.DEVNULL
        )
        (package,) = Path(scratch).glob("mermaid-*.tgz")
        with tarfile.open(package) as packed:
            packed.extract(SCRIPT, scratch, filter="data")
        html = Path(scratch) / "page.html"
        html.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body><script src="{SCRIPT}"></script>')
        page.get(html.as_uri())
        page.set_script_timeout(60)
        for name, text in todo.items():
            drawn = page.execute_async_script(DRAW, text)
            if drawn.startswith("error: "):
                sys.exit(f"{drawn}\nin the diagram that begins with: {text.splitlines()[0]}")
            (folder / name).write_text(_sized(drawn) + "\n", encoding="utf-8")
            print(f"drawn: {folder / name}")


def _sized(svg: str) -> str:
    """With the size of its view box: as a picture, "100 %" is of nothing."""
    width, height = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', svg).groups()
    return svg.replace('width="100%"', f'width="{float(width):.0f}" height="{float(height):.0f}"', 1)


if __name__ == "__main__":
    main()
