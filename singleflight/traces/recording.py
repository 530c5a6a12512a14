"""What the connector's recorder writes beside a trace: `<trace>.header.json`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from singleflight.files import strict
from singleflight.files.strict import Amount, Positive

SCHEMA = "kv-singleflight/recording/1"


class HeaderError(ValueError):
    """A header that cannot be used: one sentence, with the key, the value and what is accepted."""


@dataclass(frozen=True)
class Header:
    """What a trace of ours does not say in its rows.

    Attributes:
        block_size_tokens: tokens a hash id covers: the engine's KV block.
        model: as the engine was told.
        load_windows_ms: quantiles of the load windows observed, ms, by name, e.g. ``p50``; None: no load.
        dropped_requests: that are in no row, since the disk was too slow.
        resumable_requests: that are in no row, since they came in pieces (streaming input).
        mode: what the connector's mode came to.
        attach_refused: why attach mode would pass through there, half a sentence; None if it would not.
        max_num_seqs, max_num_batched_tokens: of the scheduler, requests and tokens a step.
        receive_threads: loads that the worker runs at a time.
        capacity_blocks: KV blocks of the engine.
        kv_bytes_per_token: of KV cache, all layers and ranks.

    The last seven are None in a recording by an earlier version.
    """

    block_size_tokens: Positive
    model: str
    load_windows_ms: dict[str, Amount] | None
    dropped_requests: Amount = 0
    resumable_requests: Amount = 0
    mode: str | None = None
    attach_refused: str | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    receive_threads: Positive | None = None
    capacity_blocks: Positive | None = None
    kv_bytes_per_token: Amount | None = None

    @property
    def left_out(self) -> str | None:
        """What the rows do not have, a sentence without a final stop; None if nothing is missing."""
        reasons = {"the disk was too slow": self.dropped_requests, "streaming input": self.resumable_requests}
        missing = [f"{count:g} ({why})" for why, count in reasons.items() if count]
        return f"requests that the recording left out: {', '.join(missing)}" if missing else None


def header_path(trace: str) -> Path:
    return Path(f"{trace}.header.json")


def header_of(trace: str) -> Header | None:
    """The header beside a trace; None if there is none, or the trace is standard input.

    Raises:
        HeaderError: it is there but cannot be used.
    """
    path = header_path(trace)
    if trace == "-" or not os.path.lexists(path):  # of a name that is too long or impossible, too
        return None
    try:
        return strict.read(path, SCHEMA, Header, known_keys_only=False)
    except strict.Refused as fault:
        raise HeaderError(str(fault)) from None
