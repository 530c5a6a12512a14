"""The docs site: `make docs`. Offline, and every warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from singleflight import __version__  # noqa: E402

project = "kv-singleflight"
version = release = __version__
project_copyright = "the kv-singleflight authors, Apache-2.0"

extensions = ["myst_parser", "settings", "matrix", "releases", "diagrams"]
exclude_patterns = ["_ext", "_static", "examples"]
nitpicky = True

myst_heading_anchors = 3  # so that design.md#modes is the same link here and on GitHub
myst_fence_as_directive = ["mermaid"]

html_theme = "furo"
html_title = f"kv-singleflight {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
smartquotes = False  # in JSON they would be wrong
highlight_language = "none"  # an indented block is a command or what it printed
