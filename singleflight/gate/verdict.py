"""The gate's answer for one trace and one deployment, as a file that the connector's `auto` mode obeys.

Standard library only: a server reads this at start-up.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from singleflight import strict
from singleflight.quantity import Quantity
from singleflight.strict import Amount, Number, Positive, Share

SCHEMA = "kv-singleflight/verdict/1"


class VerdictError(ValueError):
    """A verdict file that cannot be used: one sentence, with the key, the value and what is accepted."""


@dataclass(frozen=True)
class Fractions:
    """Shares of the steady phase at the stated window, each 0 to 1.

    Attributes:
        duplicate_cohorts: loads that more than one request needs, of all loads opened.
        duplicate_attempts: members of those, leaders included, of all attempts (cold block loads asked for).
        removable_attempts: attempts that single-flight would not have made: the redundancy.
    """

    duplicate_cohorts: Share
    duplicate_attempts: Share
    removable_attempts: Share


@dataclass(frozen=True)
class Rates:
    """Absolute rates at the stated window, all instances together, a second of real time.

    Attributes:
        requests_per_s: arrivals, each one lookup of the connector's.
        cold_loads_per_s: cold block loads asked for.
        removable_loads_per_s: those that single-flight removes.
        saving_s_per_s: the avoidable cost, request-seconds of waiting a second, lost parallelism taken off.
        coordination_s_per_s: what the layer itself costs, in the same unit.
        waits_s_per_s: expected waits, timeouts and owner failures, in the same unit.
        lost_parallelism_s_per_s: what was taken off the saving, since parallel loads would have overlapped.
    """

    requests_per_s: Amount
    cold_loads_per_s: Amount
    removable_loads_per_s: Amount
    saving_s_per_s: Amount
    coordination_s_per_s: Amount
    waits_s_per_s: Amount
    lost_parallelism_s_per_s: Amount


@dataclass(frozen=True)
class Margin:
    """Saving less coordination and waits, request-seconds a second; above 0 it pays.

    `stated` at the stated window; `low` and `high` over the sensitivity range.
    """

    low: Number
    stated: Number
    high: Number


@dataclass(frozen=True)
class Scope:
    """What the verdict was made from and for.

    Attributes:
        trace: its name. trace_sha256: hex digest of the file. requests, span_s: its size, s of trace time.
        block_size_tokens: tokens a block, of the trace and so of the deployment.
        model: as the deployment names it; None if nobody said.
        instances, capacity_blocks, routing: the deployment simulated.
        scale: how many times faster than recorded the trace was taken to run.
        window_ms: how long a load takes, real ms; w_eff_ms: window_ms x scale, ms of trace time.
        versions: of this package and of what ran the simulation.
    """

    trace: str
    trace_sha256: str
    requests: Positive
    span_s: Amount
    block_size_tokens: Positive
    model: str | None
    instances: Positive
    capacity_blocks: Positive
    routing: str
    scale: Amount
    window_ms: Amount
    w_eff_ms: Positive
    versions: dict[str, str]


@dataclass(frozen=True)
class Verdict:
    """Whether to coalesce, and why.

    Attributes:
        made_at: UTC, ISO 8601, e.g. ``2026-11-29T21:00:00Z``.
        enable: the answer.
        reasons: sentences that lead to it. flips: sentences, what would turn it.
        figures: the cost model's input, by name.
    """

    made_at: str
    enable: bool
    reasons: list[str]
    flips: list[str]
    fractions: Fractions
    rates: Rates
    margin: Margin
    scope: Scope
    figures: dict[str, Quantity]

    def __post_init__(self) -> None:
        self.made()

    def made(self) -> datetime.datetime:
        """`made_at` as an aware datetime."""
        try:
            when = datetime.datetime.fromisoformat(self.made_at)
        except ValueError:
            when = None
        if when is None or when.utcoffset() != datetime.timedelta(0):
            raise strict.Refused(
                f'made_at: "{self.made_at}" is not accepted; give a UTC time such as 2026-11-29T21:00:00Z'
            )
        return when

    def write(self, path: Path) -> None:
        """Write the file, complete or not at all.

        Raises:
            OSError: it cannot be written.
        """
        strict.write(path, SCHEMA, self)


def read(path: Path) -> Verdict:
    """Read a verdict file.

    Raises:
        VerdictError: missing, unreadable, another schema, an unknown or missing key, a wrong type or value.
    """
    try:
        return strict.read(path, SCHEMA, Verdict)
    except strict.Refused as fault:
        raise VerdictError(str(fault)) from None


def misfit(
    verdict: Verdict, *, block_size: int, model: str, now: datetime.datetime, max_age_days: float
) -> str | None:
    """Why the verdict was not made for this deployment, or no longer holds; None if it fits.

    Args:
        block_size: tokens a KV block of the running engine.
        model: its model, as the engine was told.
        now: an aware datetime.
        max_age_days: how old the verdict may be.

    Returns:
        A sentence without a final stop that says what is wrong and what to do, or None.
    """
    scope = verdict.scope
    if scope.block_size_tokens != block_size:
        return (
            f"the verdict was made for blocks of {scope.block_size_tokens} tokens, this engine's have"
            f" {block_size}; gate a trace recorded on it"
        )
    if scope.model != model:
        made_for = f"the model {scope.model}" if scope.model is not None else "no stated model"
        return f"the verdict was made for {made_for}, this engine serves {model}; gate with --model {model}"
    age_days = (now - verdict.made()).total_seconds() / 86_400
    if age_days > max_age_days:
        return (
            f"the verdict is {age_days:.1f} days old, older than max_age_days {max_age_days:g};"
            " gate a recent trace"
        )
    if age_days < -1:
        return f"the verdict was made at {verdict.made_at}, which is in the future; check the clock"
    return None
