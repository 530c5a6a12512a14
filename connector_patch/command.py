"""Entry point of the command `singleflight`.

It stands here, and not in `singleflight`, because PyPI has an unrelated `singleflight` distribution with
the same import name: were it installed over ours, an entry point inside it would only give a traceback.
"""

from __future__ import annotations

import sys

from .foreign import foreign_package


def main() -> None:
    """Run the command line, or say why that is not possible."""
    if says := foreign_package():
        sys.exit(f"error: {says}")
    from singleflight.cli.main import main as run

    run()
