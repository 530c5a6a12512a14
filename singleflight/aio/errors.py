"""What a caller sees when its values did not come and there is no fallback loader."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from ..core.stats import Reason


def shown(keys: Sequence[Hashable]) -> str:
    """The first keys, for a message."""
    return ", ".join(repr(key) for key in keys[:3]) + (", …" if len(keys) > 3 else "")


class FlightError(Exception):
    """The flight ended without all of this caller's values. Each caller gets an instance of its own.

    Attributes:
        reason: why, from the closed list that metrics use.
        keys: what is missing.
    """

    reason: ClassVar[Reason]
    what: ClassVar[str]

    def __init__(self, keys: Sequence[Hashable]) -> None:
        super().__init__(keys)
        self.keys = tuple(keys)

    def __str__(self) -> str:
        return f"{self.what}; without a value: {len(self.keys)} keys ({shown(self.keys)})"


class LoadFailed(FlightError):
    """The loader raised; `__cause__` is what it raised."""

    reason = Reason.LEADER_FAILED
    what = "the loader failed"


class FlightTimeout(FlightError, TimeoutError):
    """The caller's deadline passed first."""

    reason = Reason.DEADLINE
    what = "the deadline passed"


class FlightReset(FlightError):
    """The group was reset once too often for this caller, or its context was left."""

    reason = Reason.RESET
    what = "the group was reset or closed"


ERRORS: dict[Reason, type[FlightError]] = {
    kind.reason: kind for kind in (LoadFailed, FlightTimeout, FlightReset)
}
