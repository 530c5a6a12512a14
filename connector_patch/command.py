"""Entry point of the command `singleflight`.

It stands here, and not in `singleflight`, because PyPI has an unrelated `singleflight` distribution with
the same import name: were it installed over ours, an entry point inside it would only give a traceback.
"""

from __future__ import annotations

import sys

DISTRIBUTION = "kv-singleflight"


def foreign_package() -> str | None:
    """The sentence to print if `import singleflight` finds another package than ours."""
    import singleflight

    if getattr(singleflight, "__distribution__", None) == DISTRIBUTION:
        return None
    where = getattr(singleflight, "__file__", "unknown")
    return (
        f"`import singleflight` finds another package ({where}): PyPI's `singleflight` has the same import"
        " name; `pip uninstall singleflight`, then install kv-singleflight again"
    )


def main() -> None:
    """Run the command line, or say why that is not possible."""
    if says := foreign_package():
        sys.exit(f"error: {says}")
    from singleflight.cli import main as run

    run()
