"""`kv_connector_extra_config["singleflight"]`: parsed once, at start-up, strictly."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from singleflight.core.policy import Policy
from singleflight.files import shown

Choice = TypeVar("Choice", bound=Enum)
WHERE = "kv_connector_extra_config.singleflight"
DEFAULT_MAX_MB = 100.0
BY_BLOCK = "deadline_per_block_s"
"""A field of Policy that is not configured."""


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


class LoadOrCompute(Enum):
    """Whether a request may compute a prefix that the store has."""

    OFF = "off"
    """Never, as in stock vLLM."""
    ON = "on"
    """Where that is expected to be sooner: the receive queue is long, or the link slow."""


@dataclass(frozen=True, slots=True)
class Record:
    """Where live arrivals are recorded."""

    path: Path
    """The trace. The one before it, once it is full, is `path`.1."""
    max_mb: float = DEFAULT_MAX_MB
    """Megabytes (10**6 bytes) of one file. 100: about a million requests of ten blocks, and twice that is
    still a small disk."""


@dataclass(frozen=True, slots=True)
class Config:
    mode: Mode = Mode.AUTO
    """What the connector does. `auto`, since coalescing starts when a workload has shown that it pays; until
    then counting it costs next to nothing."""
    gate: Path | None = None
    """The verdict file of `singleflight gate`, for mode auto."""
    max_age_days: float = 30.0
    """Older verdicts do not count: a month is about as long as a workload (models, prompts, clients) stays
    what it was when it was recorded."""
    record: Record | None = None
    """Record arrivals as a trace, in any mode. No content can be told from it."""
    on_deadline: OnDeadline = OnDeadline.RECOMPUTE
    """Where a follower goes whose deadline has passed."""
    load_or_compute: LoadOrCompute = LoadOrCompute.OFF
    """Whether a request may compute a prefix that the store has, if that is expected to be sooner than its
    load behind all that is queued. Off: it pays where a load is about as slow as a prefill, but has not been
    shown never to be worse than loading (docs/benchmarks.md)."""
    deadline_per_token_s: float = 0.003125
    """Further seconds a follower waits for each token of the flights it waits for: with blocks of 16 tokens,
    `Policy`'s 0.05 s a block. By token, since what a load takes does not depend on the size of blocks."""
    policy: Policy = field(default_factory=Policy)
    """All but `deadline_per_block_s`, which follows from the block size."""

    def policy_for(self, block_size: int) -> Policy:
        """The table's policy where a block has so many tokens."""
        return replace(self.policy, deadline_per_block_s=self.deadline_per_token_s * block_size)


class _Bounded:
    """Stands in for a value that `Policy` refuses anyway, and is short in its sentence about it."""

    def __init__(self, value: Any) -> None:
        self._repr = shown.as_python(value)

    def __repr__(self) -> str:
        return self._repr

    @classmethod
    def of(cls, value: Any) -> Any:
        usable = type(value) in (bool, int, float) and abs(value) <= sys.float_info.max
        return value if usable else cls(value)


def _choice(given: Mapping[str, Any], key: str, default: Choice) -> Choice:
    value = given.get(key, default.value)
    accepted = [choice.value for choice in type(default)]
    if value not in accepted:
        raise ValueError(
            f"{WHERE}.{key}: {shown.as_python(value)} is not accepted; give one of {', '.join(accepted)}"
        )
    return type(default)(value)


def _path(given: Mapping[str, Any], key: str, where: str, what: str) -> Path | None:
    value = given.get(key)
    if value is None and key not in given:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{where}.{key}: {shown.as_python(value)} is not accepted; give the path of {what}")
    return Path(value)


def _positive(given: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = given.get(key, default)
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{where}.{key}: {shown.as_python(value)} is not accepted; give a number > 0")
    return float(value)


def _seconds(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{WHERE}.{key}: {value!r} is not accepted; give a number of seconds >= 0")
    return float(value)


def _object(given: Any, where: str, example: str, accepted: list[str]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{where}: {shown.as_python(given)} is not accepted; give an object such as {example}"
        )
    for key in given:
        if key not in accepted:
            raise ValueError(f"{where}.{shown.text(key)}: unknown key; accepted are {', '.join(accepted)}")
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
    policy_keys = [f.name for f in fields(Policy) if f.name != BY_BLOCK]
    own_keys = [f.name for f in fields(Config) if f.name != "policy"]
    accepted = [*own_keys, *policy_keys]
    if isinstance(given, Mapping) and BY_BLOCK in given:
        raise ValueError(
            f"{WHERE}.{BY_BLOCK}: is not accepted, since the larger blocks are, the fewer a load has;"
            " give deadline_per_token_s (the seconds of a block, divided by its tokens)"
        )
    given = _object(given, WHERE, '{"mode": "attach"}', accepted)
    default = Config()
    try:
        policy = Policy(**{key: _Bounded.of(given[key]) for key in policy_keys if key in given})
    except ValueError as error:
        raise ValueError(f"{WHERE}.{error}") from None
    return Config(
        _choice(given, "mode", default.mode),
        _path(given, "gate", WHERE, "a verdict file, as `singleflight gate` writes it"),
        _positive(given, "max_age_days", WHERE, default.max_age_days),
        _record(given["record"]) if "record" in given else None,
        _choice(given, "on_deadline", default.on_deadline),
        _choice(given, "load_or_compute", default.load_or_compute),
        _seconds(given, "deadline_per_token_s", default.deadline_per_token_s),
        policy,
    )
