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
        output: generated length, tokens.
    """

    input: int
    output: int


class Request(NamedTuple):
    """One arrival.

    Attributes:
        timestamp_ms: arrival, whole milliseconds, 0 to 2**53 (R1).
        hashes: the content id of each KV block of the prompt, front to back, each 0 to 2**64 - 1, never
            empty.
        lengths: prompt and output length, tokens.
    """

    timestamp_ms: int
    hashes: Sequence[int]
    lengths: Lengths
