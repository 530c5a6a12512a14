"""What the connector's recorder writes beside a trace: `<trace>.header.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from singleflight import strict
from singleflight.strict import Amount, Positive

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
    """

    block_size_tokens: Positive
    model: str
    load_windows_ms: dict[str, Amount] | None


def header_path(trace: str) -> Path:
    return Path(f"{trace}.header.json")


def header_of(trace: str) -> Header | None:
    """The header beside a trace; None if there is none, or the trace is standard input.

    Raises:
        HeaderError: it is there but cannot be used.
    """
    path = header_path(trace)
    if trace == "-" or not path.exists():
        return None
    try:
        return strict.read(path, SCHEMA, Header, known_keys_only=False)
    except strict.Refused as fault:
        raise HeaderError(str(fault)) from None
