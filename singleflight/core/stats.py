"""Counters of the table, and snapshots of them.

"Saved" means block loads avoided, not members of a cohort: the counters keep flights, attachments and
blocks apart because they answer different questions (hazard L2).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple


class Reason(Enum):
    """Why a follower fell back. Closed: metrics and documentation list exactly these."""

    LEADER_FAILED = "leader_failed"
    DEADLINE = "deadline"
    EVICTED = "evicted"
    RESET = "reset"
    UNSUPPORTED = "unsupported"
    CAPACITY = "capacity"


class Outcome(Enum):
    """How a follower left. Every follower leaves by exactly one."""

    READY = "ready"
    FELL_BACK = "fell_back"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Stats:
    """What happened so far; plain counts unless the name says otherwise."""

    flights: int = 0
    landed: int = 0
    failed: int = 0
    """Flights of which nothing was of use."""
    cut: int = 0
    """Flights that failed in part, and went on as a flight of their first blocks."""
    orphaned: int = 0
    overdue: int = 0
    overtook: int = 0
    """Flights that took blocks over from one that is expected to land later."""
    discarded: int = 0
    attached: int = 0
    blocks_led: int = 0
    blocks_adopted: int = 0
    """By followers when they attached."""
    blocks_spared: int = 0
    """Those of followers that were ready: block loads that nobody made."""
    blocks_cut: int = 0
    """Blocks of cut flights that were not there."""
    blocks_broken: int = 0
    """Blocks that a load has found to be unreadable, as far as it is known which."""
    breaker_open: int = 0
    """1 while nobody waits for others' loads, because loads fail one after the other; a gauge."""
    ready: int = 0
    cancelled: int = 0
    fell_back: Counter[Reason] = field(default_factory=Counter)
    stale_reports: int = 0
    unregistered: int = 0
    alone: int = 0
    chose_join: int = 0
    """With `load_or_compute`, of requests with a prefix in the store: who waited for another's load;"""
    chose_load: int = 0
    """who loaded it;"""
    chose_compute: int = 0
    """who computed it, since that was expected to be sooner."""
    fan_in: Counter[int] = field(default_factory=Counter)
    """Fan-in of each ended flight -> flights."""

    @property
    def waiting(self) -> int:
        """Followers that wait now: each that has attached leaves by exactly one outcome."""
        return self.attached - self.ready - self.cancelled - self.fell_back.total()

    def snapshot(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("fell_back", "fan_in")}
        plain["fell_back"] = {reason.value: self.fell_back[reason] for reason in Reason}
        plain["fan_in"] = {str(members): count for members, count in sorted(self.fan_in.items())}
        return plain


class Wait(NamedTuple):
    """A follower's wait that has ended.

    Attributes:
        seconds: from the attachment on. ended: on the driver's clock, seconds.
        reason: why it fell back, if it did. blocks: that it had adopted.
    """

    request: Hashable
    outcome: Outcome
    reason: Reason | None
    seconds: float
    ended: float
    blocks: int


class Flown(NamedTuple):
    """A flight that has ended.

    Attributes:
        landed: it did not fail. seconds: from its registration on.
        blocks: its size. fan_in: members, leader included.
    """

    landed: bool
    seconds: float
    blocks: int
    fan_in: int


REMEMBERED: Final = 8192
"""Observations kept, the latest, for a driver that takes them too late. vLLM's takes them in each step."""


@dataclass(slots=True)
class Observed:
    """Single observations, for histograms. The driver takes them out; without one they stay bounded."""

    waits: deque[Wait] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    flights: deque[Flown] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
