"""Mode auto: what the verdict file says about this deployment. A bad file is never an error, only no yes."""

from __future__ import annotations

import datetime

from singleflight.files import shown
from singleflight.gate import verdict
from singleflight.gate.verdict import VerdictError

from .config import Config

HOW = (
    "record traffic (singleflight.record), gate it (`singleflight gate`),"
    " and name the verdict as singleflight.gate"
)


def objection(config: Config, *, block_size: int, model: str, now: datetime.datetime) -> str | None:
    """Why the verdict does not let us coalesce, and what to do, as half a sentence; None if it does.

    Args:
        config: names the verdict file, and how old it may be.
        block_size: tokens a block of the running engine.
        model: its model, as the engine was told.
        now: an aware datetime.
    """
    if config.gate is None:
        return f"no verdict is named; {HOW}"
    try:
        found = verdict.read(config.gate)
    except VerdictError as error:
        return f"the verdict cannot be used: {error}"
    reason = verdict.misfit(
        found, block_size=block_size, model=model, now=now, max_age_days=config.max_age_days
    )
    if reason is not None:
        return f"{shown.path(config.gate)}: {reason}"
    if not found.enable:
        why = shown.text(found.reasons[0].rstrip("."), 500) if found.reasons else "it gives no reason"
        return f"{shown.path(config.gate)} says no ({why}); gate again when the workload changes"
    return None
