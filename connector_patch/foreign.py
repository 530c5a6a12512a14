"""Is `singleflight` ours? PyPI has an unrelated distribution with the same import name."""

from __future__ import annotations

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
