"""`kv_connector_extra_config["singleflight"]`: parsed once, at start-up, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from singleflight.policy import Policy

WHERE = "kv_connector_extra_config.singleflight"


class Mode(Enum):
    """What the connector does."""

    OFF = "off"
    """The stock connector."""
    ATTACH = "attach"
    """Followers adopt the leader's pending GPU blocks."""


@dataclass(frozen=True, slots=True)
class Config:
    # Off until a workload has shown that it pays: whoever wants it says so.
    mode: Mode = Mode.OFF
    policy: Policy = field(default_factory=Policy)


def parse(given: Any) -> Config:
    """The configuration from the value of `singleflight` (None: the defaults).

    Raises ValueError: the key, the value, and what is accepted.
    """
    if given is None:
        return Config()
    if not isinstance(given, Mapping):
        raise ValueError(f'{WHERE}: {given!r} is not accepted; give an object such as {{"mode": "attach"}}')
    policy_keys = [f.name for f in fields(Policy)]
    accepted = ["mode", *policy_keys]
    for key in given:
        if key not in accepted:
            raise ValueError(f"{WHERE}.{key}: unknown key; accepted are {', '.join(accepted)}")
    mode = given.get("mode", Mode.OFF.value)
    modes = [m.value for m in Mode]
    if mode not in modes:
        raise ValueError(f"{WHERE}.mode: {mode!r} is not accepted; give one of {', '.join(modes)}")
    try:
        policy = Policy(**{key: given[key] for key in policy_keys if key in given})
    except ValueError as error:
        raise ValueError(f"{WHERE}.{error}") from None
    return Config(Mode(mode), policy)
