"""Counters of the table, and snapshots of them.

"Saved" means block loads avoided, not members of a cohort: the counters keep flights, attachments and
blocks apart because they answer different questions (hazard L2).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


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
    orphaned: int = 0
    overdue: int = 0
    overtook: int = 0
    """Flights that took blocks over from one that is expected to land later."""
    discarded: int = 0
    attached: int = 0
    blocks_led: int = 0
    blocks_adopted: int = 0
    ready: int = 0
    cancelled: int = 0
    fell_back: Counter[Reason] = field(default_factory=Counter)
    stale_reports: int = 0
    unregistered: int = 0
    alone: int = 0
    fan_in: Counter[int] = field(default_factory=Counter)
    """Fan-in of each ended flight -> flights."""

    def snapshot(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("fell_back", "fan_in")}
        plain["fell_back"] = {reason.value: self.fell_back[reason] for reason in Reason}
        plain["fan_in"] = {str(members): count for members, count in sorted(self.fan_in.items())}
        return plain
