"""`kv_connector_extra_config["singleflight"]`: parsed once, at start-up, strictly."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from singleflight.policy import Policy

Choice = TypeVar("Choice", bound=Enum)
WHERE = "kv_connector_extra_config.singleflight"
DEFAULT_MAX_MB = 100.0


class Mode(Enum):
    """What the connector does."""

    AUTO = "auto"
    """Attach if the verdict file says that it pays here, otherwise shadow."""
    OFF = "off"
    """The stock connector."""
    ATTACH = "attach"
    """Followers adopt the leader's pending GPU blocks."""
    PARK = "park"
    """Followers are asked again once the leader's blocks are local hits."""
    SHADOW = "shadow"
    """Stock behaviour; counts what would have been coalesced."""


class OnDeadline(Enum):
    """Where a follower goes whose deadline has passed."""

    RECOMPUTE = "recompute"
    """Compute the prefix locally: a stalled load path would stall its own Get too."""
    LOAD = "load"
    """Load for itself, as the stock connector would have."""


@dataclass(frozen=True, slots=True)
class Record:
    """Where live arrivals are recorded.

    Attributes:
        path: the trace. The one before it, once it is full, is `path`.1.
        max_mb: megabytes (10**6 bytes) of one file. 100: about a million requests of ten blocks, and twice
            that is still a small disk.
    """

    path: Path
    max_mb: float = DEFAULT_MAX_MB


@dataclass(frozen=True, slots=True)
class Config:
    # Coalescing starts when a workload has shown that it pays. Until then counting it costs next to nothing.
    mode: Mode = Mode.AUTO
    gate: Path | None = None
    """The verdict file of `singleflight gate`, for mode auto."""
    max_age_days: float = 30.0
    """Older verdicts do not count: a month is about as long as a workload (models, prompts, clients) stays
    what it was when it was recorded."""
    record: Record | None = None
    on_deadline: OnDeadline = OnDeadline.RECOMPUTE
    policy: Policy = field(default_factory=Policy)


def _choice(given: Mapping[str, Any], key: str, default: Choice) -> Choice:
    value = given.get(key, default.value)
    accepted = [choice.value for choice in type(default)]
    if value not in accepted:
        raise ValueError(f"{WHERE}.{key}: {value!r} is not accepted; give one of {', '.join(accepted)}")
    return type(default)(value)


def _path(given: Mapping[str, Any], key: str, where: str, what: str) -> Path | None:
    value = given.get(key)
    if value is None and key not in given:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{where}.{key}: {value!r} is not accepted; give the path of {what}")
    return Path(value)


def _positive(given: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = given.get(key, default)
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{where}.{key}: {value!r} is not accepted; give a number > 0")
    return float(value)


def _object(given: Any, where: str, example: str, accepted: list[str]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: {given!r} is not accepted; give an object such as {example}")
    for key in given:
        if key not in accepted:
            raise ValueError(f"{where}.{key}: unknown key; accepted are {', '.join(accepted)}")
    return given


def _record(given: Any) -> Record:
    where = f"{WHERE}.record"
    found = _object(given, where, '{"path": "trace.jsonl"}', ["path", "max_mb"])
    path = _path(found, "path", where, "a file to write")
    if path is None:
        raise ValueError(f"{where}.path: is missing; accepted is the path of a file")
    return Record(path, _positive(found, "max_mb", where, DEFAULT_MAX_MB))


def parse(given: Any) -> Config:
    """The configuration from the value of `singleflight` (None: the defaults).

    Raises ValueError: the key, the value, and what is accepted.
    """
    if given is None:
        return Config()
    policy_keys = [f.name for f in fields(Policy)]
    accepted = ["mode", "gate", "max_age_days", "record", "on_deadline", *policy_keys]
    given = _object(given, WHERE, '{"mode": "attach"}', accepted)
    default = Config()
    try:
        policy = Policy(**{key: given[key] for key in policy_keys if key in given})
    except ValueError as error:
        raise ValueError(f"{WHERE}.{error}") from None
    return Config(
        _choice(given, "mode", default.mode),
        _path(given, "gate", WHERE, "a verdict file, as `singleflight gate` writes it"),
        _positive(given, "max_age_days", WHERE, default.max_age_days),
        _record(given["record"]) if "record" in given else None,
        _choice(given, "on_deadline", default.on_deadline),
        policy,
    )
