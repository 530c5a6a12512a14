"""One flight: a leader's load of a run of blocks, as a table of states and events.

The table is data (after h11): the diagram in docs/design.md is generated from it and tests walk it.
An event that has no row is illegal and leaves the flight unchanged.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Final


class State(Enum):
    """Where a flight is."""

    LOADING = "loading"
    """The leader waits for its own load; others may attach."""
    ORPHANED = "orphaned"
    """The leader is gone, the load still runs; others may attach."""
    OVERDUE = "overdue"
    """The load still runs but has outlived the budget of its size: nobody may attach any more."""
    DISCARDED = "discarded"
    """The load still runs but the cache was reset: nobody may attach, and it is never published."""
    LANDED = "landed"
    """The blocks are there. Final."""
    FAILED = "failed"
    """The load failed. Final."""


class Event(Enum):
    """What can happen to a flight."""

    LEADER_LEFT = "leader left"
    OVERDUE = "deadline passed"
    RESET = "reset"
    CUT = "failed in part"
    """Only its first blocks are there. It goes on as a flight of these."""
    LAND = "land"
    FAIL = "fail"


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.LOADING, Event.LEADER_LEFT): State.ORPHANED,
        (State.LOADING, Event.OVERDUE): State.OVERDUE,
        (State.LOADING, Event.RESET): State.DISCARDED,
        (State.LOADING, Event.CUT): State.LOADING,
        (State.LOADING, Event.LAND): State.LANDED,
        (State.LOADING, Event.FAIL): State.FAILED,
        (State.ORPHANED, Event.OVERDUE): State.OVERDUE,
        (State.ORPHANED, Event.RESET): State.DISCARDED,
        (State.ORPHANED, Event.CUT): State.ORPHANED,
        (State.ORPHANED, Event.LAND): State.LANDED,
        (State.ORPHANED, Event.FAIL): State.FAILED,
        (State.OVERDUE, Event.LEADER_LEFT): State.OVERDUE,
        (State.OVERDUE, Event.OVERDUE): State.OVERDUE,
        (State.OVERDUE, Event.RESET): State.DISCARDED,
        (State.OVERDUE, Event.CUT): State.OVERDUE,
        (State.OVERDUE, Event.LAND): State.LANDED,
        (State.OVERDUE, Event.FAIL): State.FAILED,
        (State.DISCARDED, Event.LEADER_LEFT): State.DISCARDED,
        (State.DISCARDED, Event.RESET): State.DISCARDED,
        (State.DISCARDED, Event.CUT): State.DISCARDED,
        (State.DISCARDED, Event.LAND): State.LANDED,
        (State.DISCARDED, Event.FAIL): State.FAILED,
    }
)

JOINABLE: Final = frozenset({State.LOADING, State.ORPHANED})
FINAL: Final = frozenset({State.LANDED, State.FAILED})


class IllegalEvent(Exception):
    """The event has no row in TRANSITIONS for the flight's state; the flight is unchanged."""


class Flight:
    """A leader's load of `hashes`, in order, into `destination`.

    `generation` is unique in a table's life: whoever reports on a flight names it, so a late report can
    never be mistaken for one about a newer flight of the same blocks.

    Attributes:
        generation: the flight's name.
        leader: the request that owns the load.
        hashes: block hashes, in prompt order; length n.
        destination: what the driver keeps for each hash (GPU blocks in vLLM); length n, opaque here.
        hit: the block hash right after the run, if the leader's lookup has found it and it is not loaded.
        miss: the first block hash after the run which the leader's lookup did not find, if it is known.
        started: when the flight was registered, seconds on the driver's monotonic clock.
        work: blocks that the link has to bring before the last of these (`Forecast`); None if it queues.
        whole: all of its hashes point at it in the table, and no two are the same. Then a run through it is
            one comparison of tuples. False for good once another flight has one of them (`table._list`).
        state: see `State`.
        followers: requests that wait for this flight, in order of arrival -> how many of its blocks, counted
            from the first, have to be there for them.
        fan_in: members so far, leader included; never decreases.
    """

    __slots__ = (
        "destination",
        "fan_in",
        "followers",
        "generation",
        "hashes",
        "hit",
        "leader",
        "miss",
        "started",
        "state",
        "whole",
        "work",
    )

    def __init__(
        self,
        generation: int,
        leader: Hashable,
        hashes: Sequence[Hashable],
        destination: Sequence[Any],
        started: float,
        miss: Hashable | None = None,
        work: int | None = None,
        hit: Hashable | None = None,
    ) -> None:
        if len(hashes) != len(destination):
            raise ValueError(f"{len(hashes)} hashes but {len(destination)} destinations")
        if not hashes:
            raise ValueError("a flight has at least one block")
        self.generation = generation
        self.leader = leader
        self.hashes = tuple(hashes)
        self.destination = tuple(destination)
        self.started = started
        self.hit = hit
        self.miss = miss
        self.work = work
        self.whole = True
        self.state = State.LOADING
        self.followers: dict[Hashable, int] = {}
        self.fan_in = 1

    @property
    def joinable(self) -> bool:
        return self.state in JOINABLE

    def apply(self, event: Event) -> State:
        """Take the event and return the new state; IllegalEvent, and no change, if there is no row for it."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalEvent(f"{event.value!r} in state {self.state.value!r}: {self!r}") from None
        return self.state

    def cut(self, blocks: int) -> tuple[Hashable, ...]:
        """Go on as a flight of the first `blocks` blocks; returns the hashes of the others.

        Raises ValueError, and changes nothing, unless there are so many; IllegalEvent as `apply` does.
        """
        if not 0 < blocks <= len(self.hashes):
            raise ValueError(f"cannot cut {self!r} to {blocks} blocks")
        self.apply(Event.CUT)
        lost = self.hashes[blocks:]
        self.hashes, self.destination = self.hashes[:blocks], self.destination[:blocks]
        self.hit = self.miss = None  # they were about what comes after the whole run
        return lost

    def __repr__(self) -> str:
        return (
            f"<Flight #{self.generation} {self.state.value} leader={self.leader!r}"
            f" blocks={len(self.hashes)} followers={list(self.followers)!r}>"
        )


def diagram() -> str:
    """The transitions as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.LOADING.name}: lead"]
    for (state, event), target in TRANSITIONS.items():
        lines.append(f"    {state.name} --> {target.name}: {event.value}")
    lines += [f"    {state.name} --> [*]" for state in State if state in FINAL]
    return "\n".join(lines)
