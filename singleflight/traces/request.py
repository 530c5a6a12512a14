"""What every trace format comes down to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_TIMESTAMP_MS = 2**53
"""Largest timestamp accepted, ms: no float64 tool loses a digit of it, and time + window stays far inside
int64."""

MAX_HASH = 2**64 - 1
MAX_TOKENS = 2**40


class Lengths(NamedTuple):
    """Tokens of one request.

    Attributes:
        input: prompt length, tokens.
        output: generated length, tokens; None if the trace does not say.
    """

    input: int
    output: int | None


class Observed(NamedTuple):
    """What the connector's recorder saw of one request; times in ms after its arrival, None where it did not
    come to that.

    Attributes:
        looked_up_ms: the scheduler first asked the connector about it.
        admitted_ms: the scheduler first gave it KV blocks; a load is handed over in the same step.
        loaded_blocks: blocks of its own load; 0 for a follower.
        landed_ms: the scheduler heard that all it waited for was there.
        prefill_ms: its first tokens were scheduled.
        prefill_tokens: prompt tokens that were computed, neither cached nor loaded.
        first_token_ms: its first token came.
    """

    looked_up_ms: float | None = None
    admitted_ms: float | None = None
    loaded_blocks: int = 0
    landed_ms: float | None = None
    prefill_ms: float | None = None
    prefill_tokens: int | None = None
    first_token_ms: float | None = None


class Request(NamedTuple):
    """One arrival.

    Attributes:
        timestamp_ms: arrival, whole milliseconds, 0 to 2**53 (R1).
        hashes: the content id of each KV block of the prompt, front to back, each 0 to 2**64 - 1, never
            empty.
        lengths: prompt and output length, tokens.
        observed: in a recording of ours.
    """

    timestamp_ms: int
    hashes: Sequence[int]
    lengths: Lengths
    observed: Observed | None = None
