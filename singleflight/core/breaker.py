"""A circuit breaker: after failures in a row, nobody waits for others' loads for a while.

The transitions are data, as those of a flight are. No clock: the driver passes `now`. The pattern is Nygard's
("Release It!", chapter 5); half-open is left at the first load that ends, well or badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final


class State(Enum):
    CLOSED = "closed"
    """Requests wait for others' loads."""
    OPEN = "open"
    """They do not."""
    HALF_OPEN = "half-open"
    """They do again, on trial."""


class Event(Enum):
    LANDED = "landed"
    """A load has landed in time."""
    FAILED = "failed"
    """A load has failed or is overdue."""
    TRIPPED = "tripped"
    """The same, and it is the last straw: so many in a row."""
    COOLED = "cooled"
    """It has been open for long enough."""


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.CLOSED, Event.LANDED): State.CLOSED,
        (State.CLOSED, Event.FAILED): State.CLOSED,
        (State.CLOSED, Event.TRIPPED): State.OPEN,
        (State.OPEN, Event.LANDED): State.HALF_OPEN,
        (State.OPEN, Event.FAILED): State.OPEN,
        (State.OPEN, Event.TRIPPED): State.OPEN,
        (State.OPEN, Event.COOLED): State.HALF_OPEN,
        (State.HALF_OPEN, Event.LANDED): State.CLOSED,
        (State.HALF_OPEN, Event.FAILED): State.OPEN,
        (State.HALF_OPEN, Event.TRIPPED): State.OPEN,
    }
)
"""COOLED comes only while it is open."""


class Breaker:
    """Whether waiting for others' loads makes sense at present.

    Args:
        failures: so many loads in a row that fail or are overdue open it; 0: it never opens.
        pause_s: seconds that it then stays open, counted from the last failure.
    """

    def __init__(self, failures: int, pause_s: float) -> None:
        self._failures = failures
        self._pause_s = pause_s
        self._in_a_row = 0
        self._until = 0.0
        self.state = State.CLOSED

    def allows(self, now: float) -> bool:
        """Whether a request may wait for another's load. Costs a comparison while it is closed."""
        if self.state is State.OPEN and now >= self._until:
            self._apply(Event.COOLED)
        return self.state is not State.OPEN

    def landed(self) -> None:
        """A load has landed in time."""
        self._in_a_row = 0
        self._apply(Event.LANDED)

    def failed(self, now: float) -> None:
        """A load has failed or is overdue."""
        if not self._failures:
            return
        self._in_a_row += 1
        self._apply(Event.TRIPPED if self._in_a_row >= self._failures else Event.FAILED)
        if self.state is State.OPEN:
            self._until = now + self._pause_s

    def _apply(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]
