"""`kv_connector_extra_config["singleflight"]`: parsed once, at start-up, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from singleflight.policy import Policy

Choice = TypeVar("Choice", bound=Enum)
WHERE = "kv_connector_extra_config.singleflight"


class Mode(Enum):
    """What the connector does."""

    OFF = "off"
    """The stock connector."""
    ATTACH = "attach"
    """Followers adopt the leader's pending GPU blocks."""
    SHADOW = "shadow"
    """Stock behaviour; counts what would have been coalesced."""


class OnDeadline(Enum):
    """Where a follower goes whose deadline has passed."""

    RECOMPUTE = "recompute"
    """Compute the prefix locally: a stalled load path would stall its own Get too."""
    LOAD = "load"
    """Load for itself, as the stock connector would have."""


@dataclass(frozen=True, slots=True)
class Config:
    # Off until a workload has shown that it pays: whoever wants it says so.
    mode: Mode = Mode.OFF
    on_deadline: OnDeadline = OnDeadline.RECOMPUTE
    policy: Policy = field(default_factory=Policy)


def _choice(given: Mapping[str, Any], key: str, default: Choice) -> Choice:
    value = given.get(key, default.value)
    accepted = [choice.value for choice in type(default)]
    if value not in accepted:
        raise ValueError(f"{WHERE}.{key}: {value!r} is not accepted; give one of {', '.join(accepted)}")
    return type(default)(value)


def parse(given: Any) -> Config:
    """The configuration from the value of `singleflight` (None: the defaults).

    Raises ValueError: the key, the value, and what is accepted.
    """
    if given is None:
        return Config()
    if not isinstance(given, Mapping):
        raise ValueError(f'{WHERE}: {given!r} is not accepted; give an object such as {{"mode": "attach"}}')
    policy_keys = [f.name for f in fields(Policy)]
    accepted = ["mode", "on_deadline", *policy_keys]
    for key in given:
        if key not in accepted:
            raise ValueError(f"{WHERE}.{key}: unknown key; accepted are {', '.join(accepted)}")
    mode = _choice(given, "mode", Mode.OFF)
    on_deadline = _choice(given, "on_deadline", OnDeadline.RECOMPUTE)
    try:
        policy = Policy(**{key: given[key] for key in policy_keys if key in given})
    except ValueError as error:
        raise ValueError(f"{WHERE}.{error}") from None
    return Config(mode, on_deadline, policy)
