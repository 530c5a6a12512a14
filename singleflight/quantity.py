"""A figure, its unit, and where it came from: no number of the gate is without the three."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from singleflight.strict import Number


class Origin(Enum):
    """Where a figure came from."""

    MEASURED = "measured"
    """By `singleflight calibrate`, or from the trace."""
    GIVEN = "given"
    """By a person, on the command line or in a file."""
    DEFAULT = "default"
    """By nobody: an assumption, see docs/gate.md."""


@dataclass(frozen=True)
class Quantity:
    """`value` in `unit`, e.g. 0.005 ``s``, 5e9 ``bytes/s``."""

    value: Number
    unit: str
    origin: Origin
