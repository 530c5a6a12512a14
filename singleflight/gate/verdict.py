"""The gate's answer for some traffic and one deployment, as a file that the connector's `auto` mode obeys.

Standard library only: a server reads this at start-up.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path

from singleflight.files import shown, strict
from singleflight.files.strict import Amount, Number, Positive, Share
from singleflight.twin.quantity import Quantity

SCHEMA = "kv-singleflight/verdict/2"
AGAIN = "run `singleflight gate` again"


class VerdictError(ValueError):
    """A verdict file that cannot be used: one sentence, with the key, the value and what is accepted."""


@dataclass(frozen=True)
class Prediction:
    """One mode at the stated point, over the requests after the warm-up.

    Attributes:
        median_s, p99_s, mean_s: time to first token, s; quantiles are nearest rank.
        gets: loads. blocks: block loads, those of the Gets.
    """

    median_s: Amount
    p99_s: Amount
    mean_s: Amount
    gets: Amount
    blocks: Amount


@dataclass(frozen=True)
class Range:
    """A share, at the stated point, and its extremes over the neighbourhood."""

    low: Number
    stated: Number
    high: Number


@dataclass(frozen=True)
class Gain:
    """By how much attach is better than stock, as a share of stock; below 0 it is worse.

    Attributes:
        mean, p99: of TTFT. least_mean, least_p99: what both must reach everywhere for a yes.
    """

    mean: Range
    p99: Range
    least_mean: Number
    least_p99: Number


@dataclass(frozen=True)
class Trace:
    """One trace file.

    Attributes:
        name: its file's name without suffixes. sha256: hex digest of the file.
        requests, span_s: its size, s of trace time. steady_requests: those after the warm-up.
    """

    name: str
    sha256: str
    requests: Positive
    steady_requests: Positive
    span_s: Amount


@dataclass(frozen=True)
class Scope:
    """What the verdict was made from and for.

    Attributes:
        traces: what arrives; several are one for each instance.
        steady_requests: those of all traces after the warm-up, which the figures are of.
        block_size_tokens: tokens a block, of the traces and so of the deployment.
        model: as the deployment names it; None if nobody said.
        instances, routing: the deployment; one trace is dealt out over its instances.
        capacity_blocks, receive_threads, max_num_seqs, max_num_batched_tokens: of one instance.
        store: ``computed`` or ``warm``, see `twin.instance.Instance`.
        scale: how many times faster than recorded the traces were taken to run.
        versions: of this package and of what ran the twin.
    """

    traces: list[Trace]
    steady_requests: Positive
    block_size_tokens: Positive
    model: str | None
    instances: Positive
    routing: str
    capacity_blocks: Positive
    receive_threads: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    store: str
    scale: Amount
    versions: dict[str, str]


@dataclass(frozen=True)
class Verdict:
    """Whether to coalesce, and why.

    Attributes:
        made_at: UTC, ISO 8601, e.g. ``2026-11-29T21:00:00Z``.
        enable: the answer.
        reasons: sentences that lead to it. flips: sentences, what would turn it.
        ttft: stock, attach and park.
        gain: of attach over stock.
        redundancy: share of stock's block loads that repeat one in flight, at the stated point.
        figures: the twin's input, by name.
    """

    made_at: str
    enable: bool
    reasons: list[str]
    flips: list[str]
    ttft: dict[str, Prediction]
    gain: Gain
    redundancy: Share
    scope: Scope
    figures: dict[str, Quantity]

    def __post_init__(self) -> None:
        self.made()
        for mode in ("stock", "attach"):
            if mode not in self.ttft:
                raise strict.Refused(f"ttft.{mode}: is missing; give an object")

    def made(self) -> datetime.datetime:
        """`made_at` as an aware datetime."""
        try:
            when = datetime.datetime.fromisoformat(self.made_at)
        except ValueError:
            when = None
        if when is None or when.utcoffset() != datetime.timedelta(0):
            raise strict.Refused(
                f"made_at: {shown.as_json(self.made_at)} is not accepted;"
                " give a UTC time such as 2026-11-29T21:00:00Z"
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
        return strict.read(path, SCHEMA, Verdict, again=AGAIN)
    except strict.Refused as fault:
        raise VerdictError(str(fault)) from None


def found(path: Path | None) -> Verdict | None:
    """What a verdict file says, for who only shows it; None without one that can be read."""
    try:
        return read(path) if path is not None else None
    except VerdictError:
        return None


_SNAPSHOT = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[^/]+/?$")


def hub_name(model: str) -> str:
    """A model's name as people give it. With the hub offline vLLM replaces ``org/name`` by the folder of the
    hub's cache that has it, ``.../models--org--name/snapshots/<revision>``; that is the same model, whatever
    the revision and wherever the cache."""
    snapshot = _SNAPSHOT.search(model)
    return snapshot[1].replace("--", "/", 1) if snapshot else model


def misfit(
    verdict: Verdict, *, block_size: int, model: str, now: datetime.datetime, max_age_days: float
) -> str | None:
    """Why the verdict was not made for this deployment, or no longer holds; None if it fits.

    Args:
        block_size: tokens a KV block of the running engine.
        model: its model, as the engine was told; compared by `hub_name`.
        now: an aware datetime.
        max_age_days: how old the verdict may be.

    Returns:
        A sentence without a final stop that says what is wrong and what to do, or None.
    """
    scope, model = verdict.scope, hub_name(model)
    if scope.block_size_tokens != block_size:
        return (
            f"the verdict was made for blocks of {scope.block_size_tokens} tokens, this engine's have"
            f" {block_size}; gate a trace recorded on it"
        )
    if scope.model is None or hub_name(scope.model) != model:
        made_for = f"the model {shown.path(scope.model)}" if scope.model is not None else "no stated model"
        return f"the verdict was made for {made_for}, this engine serves {model}; gate with --model {model}"
    age_days = (now - verdict.made()).total_seconds() / 86_400
    if age_days > max_age_days:
        return (
            f"the verdict is {age_days:.1f} days old, older than max_age_days {max_age_days:g};"
            " gate a recent trace"
        )
    if age_days < -1:
        return (
            f"the verdict was made at {shown.text(verdict.made_at)}, which is in the future; check the clock"
        )
    return None
