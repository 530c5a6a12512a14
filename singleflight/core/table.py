"""The pending-block table: which block is being loaded by whom, and who waits for it.

Sans-IO: no clock, no thread, no callback. The driver passes `now` (monotonic seconds), carries out the
effects that a call returns, and reports what the world did. Not thread-safe: one driver, one thread.

Removal is compare-and-delete: a hash leaves the table only while it still points at the flight that
leaves (hazards H2, H4).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import Any, NamedTuple

from .estimate import Forecast
from .flight import Event, Flight, State
from .policy import Policy
from .stats import Flown, Observed, Outcome, Reason, Stats, Wait

FORGETTING = 0.9
"""What is left of the longest observed load after each shorter one: it halves in seven."""


class Segment(NamedTuple):
    """Blocks [start, start + length) of one flight."""

    flight: Flight
    start: int
    length: int

    @property
    def destination(self) -> tuple[Any, ...]:
        return self.flight.destination[self.start : self.start + self.length]

    @property
    def _at_end(self) -> bool:
        return self.start + self.length == len(self.flight.hashes)

    def known_hit(self, block_hash: Hashable) -> bool:
        """Whether the leader's lookup has found this block, the next after the segment, and leaves it out."""
        return self._at_end and self.flight.hit is not None and self.flight.hit == block_hash

    def known_miss(self, block_hash: Hashable) -> bool:
        """Whether the leader's lookup has answered for this block, which comes after the segment, already: it
        is not in the store."""
        return self._at_end and self.flight.miss is not None and self.flight.miss == block_hash


class Publish(NamedTuple):
    """Effect: make the landed flight's blocks local prefix-cache hits, now, before its followers go on."""

    flight: Flight


class Left(NamedTuple):
    """Effect: the follower is out of the table, by this outcome (and reason, if it fell back)."""

    request: Hashable
    outcome: Outcome
    reason: Reason | None = None


Effect = Publish | Left


@dataclass(slots=True)
class _Member:
    """What is remembered of a request from its first attachment until it is ready or forgotten."""

    deadline: float
    waits_for: dict[int, Flight] = field(default_factory=dict)
    handovers: int = 0
    since: float = 0.0
    """When it attached, the last time."""
    blocks: int = 0
    """That it then adopted."""


class PendingBlockTable:
    """hash -> (flight, index), the flights, and their followers."""

    def __init__(
        self, policy: Policy | None = None, forecast: Forecast | None = None, *, chained: bool = False
    ) -> None:
        """`chained`: each hash covers all before it, so runs are the same where their last hashes are."""
        self.policy = policy or Policy()
        self.forecast = forecast or Forecast()
        self.stats = Stats()
        self.observed = Observed()
        self._chained = chained
        self._pending: dict[Hashable, tuple[Flight, int]] = {}
        self._flights: dict[int, Flight] = {}
        self._leads: dict[Hashable, Flight] = {}
        self._members: dict[Hashable, _Member] = {}
        self._slowest_s = 0.0  # the longest load lately, forgotten a little with every shorter one
        self._next_deadline = math.inf  # no later than that of any waiting member or joinable flight
        self._generation = 0

    # -- questions; they change nothing and may be asked any number of times ---------------------------

    def __len__(self) -> int:
        """Pending blocks; 0 on an idle server, where this is all that a probe costs."""
        return len(self._pending)

    def find(self, block_hash: Hashable) -> tuple[Flight, int] | None:
        """The flight that loads this block and the block's index in it, if one may still be joined."""
        return self._pending.get(block_hash)

    def run(self, hashes: Sequence[Hashable], start: int, stop: int) -> list[Segment]:
        """The longest run of pending blocks that begins at hashes[start] and ends before `stop`.

        A run may cross flights (A leads 1-8, B adopts them and leads 9-12): one Segment for each.
        """
        segments: list[Segment] = []
        i = start
        while i < stop and (found := self._pending.get(hashes[i])) is not None:
            flight, first = found
            length = 1
            if flight.whole and self._chained:
                length = self._alike(flight, first, hashes, i, stop)
            elif flight.whole:  # then to compare hashes is enough, which tuples do at once
                theirs = flight.hashes[first : first + stop - i]
                mine = tuple(hashes[i : i + len(theirs)])
                length = len(mine)
                if theirs != mine:
                    length = next(compress(count(), map(ne, theirs, mine)), length)
            else:
                while i + length < stop and self._pending.get(hashes[i + length]) == (flight, first + length):
                    length += 1
            segments.append(Segment(flight, first, length))
            i += length
        return segments

    @staticmethod
    def _alike(flight: Flight, first: int, hashes: Sequence[Hashable], start: int, stop: int) -> int:
        """How many of the flight's hashes from `first` on are those from `start` on, the first one included;
        by the last of them, or by halving."""
        theirs = flight.hashes
        low, high = 1, min(len(theirs) - first, stop - start)
        if theirs[first + high - 1] == hashes[start + high - 1]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if theirs[first + middle - 1] == hashes[start + middle - 1]:
                low = middle
            else:
                high = middle
        return low

    def may_join(self, request: Hashable, now: float) -> bool:
        """False once the request has used up its hand-overs or its deadline: it goes alone."""
        member = self._members.get(request)
        return member is None or (member.handovers <= self.policy.max_handovers and now < member.deadline)

    def may_retry(self, request: Hashable) -> bool:
        """Whether a flight that it waited for has failed, and it has hand-overs left."""
        member = self._members.get(request)
        return member is not None and 0 < member.handovers <= self.policy.max_handovers

    def worth_joining(self, segments: Sequence[Segment], blocks: int, now: float, then: int = 0) -> bool:
        """Whether waiting should take no longer than loading all `blocks` blocks alone (`Forecast`).

        `then` is for a driver whose followers load the rest of their blocks only after the wait: so many.
        """
        flights = (segment.flight for segment in segments)
        air, patience = self._flights.values(), self.policy.join_patience
        return self.forecast.worth_joining(flights, blocks, air, patience, now, then)

    def budget_s(self, blocks: int) -> float:
        """Seconds from attach to ready for flights of `blocks` blocks together: the policy's, or more where
        loads have taken long lately and the policy asks to learn from that."""
        return max(self.policy.budget_s(blocks), self.policy.deadline_learned_factor * self._slowest_s)

    @property
    def in_air(self) -> int:
        """Flights that have neither landed nor failed."""
        return len(self._flights)

    def leads(self, request: Hashable) -> Flight | None:
        return self._leads.get(request)

    def followers(self, generation: int) -> int:
        """How many wait for this flight; 0 if it has ended."""
        flight = self._flights.get(generation)
        return len(flight.followers) if flight is not None else 0

    def waiting(self, request: Hashable) -> bool:
        member = self._members.get(request)
        return member is not None and bool(member.waits_for)

    # -- what requests do --------------------------------------------------------------------------------

    def lead(
        self,
        request: Hashable,
        hashes: Sequence[Hashable],
        destination: Sequence[Any],
        now: float,
        miss: Hashable | None = None,
        hit: Hashable | None = None,
        *,
        over: bool = False,
    ) -> Flight | None:
        """Register the load that `request` has just been given destinations for.

        Hashes that are already pending stay with their flight, unless that one is expected to land later, or
        the driver says (`over`) that this one serves more requests: then whoever comes next joins this one.
        Returns None where the flight is not
        registered (table full, or the request goes alone): the load then runs as in stock vLLM.
        Raises ValueError, and changes nothing, if the request already leads, if the lengths differ, or if
        there is nothing to lead.
        """
        if request in self._leads:
            raise ValueError(f"{request!r} already leads {self._leads[request]!r}")
        work = self.forecast.work(len(hashes), self._flights.values())
        flight = Flight(self._generation + 1, request, hashes, destination, now, miss, work, hit)
        if not self.may_join(request, now):
            self.stats.alone += 1
            return None
        if len(self._pending) + len(hashes) > self.policy.max_blocks:
            self.stats.unregistered += 1
            return None
        self._generation = flight.generation
        self._flights[flight.generation] = flight
        self._leads[request] = flight
        self._next_deadline = min(self._next_deadline, self._outlived_at(flight))
        self._list(flight, now, over)
        self.stats.flights += 1
        self.stats.blocks_led += len(flight.hashes)
        return flight

    def attach(
        self, request: Hashable, segments: Sequence[Segment], now: float, *, deadline: float | None = None
    ) -> None:
        """Make `request` a follower of each segment's flight, until all of them have landed.

        `deadline` is a time on the driver's clock; without one it is `now` plus the budget for all blocks of
        these flights, since a block is ready when its whole flight is. It counts from the first attachment,
        and a hand-over does not restart it.
        Raises ValueError, and changes nothing, if there is nothing to attach to, if a flight can no
        longer be joined, if the request leads one of them, waits already, or goes alone.
        """
        if not segments:
            raise ValueError("nothing to attach to")
        if any(not s.flight.joinable or s.flight is self._leads.get(request) for s in segments):
            raise ValueError(f"{request!r} cannot join {[s.flight for s in segments]!r}")
        if self.waiting(request):
            raise ValueError(f"{request!r} waits already")
        if not self.may_join(request, now):
            raise ValueError(f"{request!r} goes alone")
        blocks = sum(s.length for s in segments)
        member = self._members.get(request)
        if member is None:
            size = sum(len(flight.hashes) for flight in {s.flight for s in segments})
            until = now + self.budget_s(size) if deadline is None else deadline
            member = self._members[request] = _Member(until)
        for segment in segments:
            flight = segment.flight
            if flight.generation not in member.waits_for:
                member.waits_for[flight.generation] = flight
                flight.followers[request] = 0
                flight.fan_in += 1
            flight.followers[request] = max(flight.followers[request], segment.start + segment.length)
        member.since, member.blocks = now, blocks
        self._next_deadline = min(self._next_deadline, member.deadline)
        self.stats.attached += 1
        self.stats.blocks_adopted += blocks

    # Calls without `now` are carried out as well, but observe no wait and no duration.

    def leave(self, request: Hashable, now: float | None = None) -> list[Left]:
        """The request is gone (finished or aborted): forget it.

        As a follower it is CANCELLED and drops only its own references. A flight that it leads is
        orphaned: the load runs on and followers finish. Unknown requests are fine.
        """
        effects: list[Left] = []
        member = self._members.get(request)
        if member is not None and member.waits_for:
            effects.append(self._release(request, Outcome.CANCELLED, now=now))
        self._members.pop(request, None)
        flight = self._leads.pop(request, None)
        if flight is not None:
            if flight.state is State.LOADING:
                self.stats.orphaned += 1
            flight.apply(Event.LEADER_LEFT)
        return effects

    # -- what loads do -----------------------------------------------------------------------------------

    def land(
        self, generation: int, now: float | None = None, *, ended: float | None = None, learn: bool = True
    ) -> list[Effect]:
        """The load of this flight is complete: publish it, and release followers it was the last for.

        A flight that a reset has discarded is not published. With `now`, it is learned how long it took:
        until `ended`, if the load was complete before it could land. Not `learn`: it failed in part.
        """
        flight = self._end(generation)
        if flight is None:
            return []
        if now is not None and learn:
            took = (now if ended is None else ended) - flight.started
            self._slowest_s = max(took, self._slowest_s * FORGETTING)
            self.forecast.landed(flight, took)
        effects: list[Effect] = [] if flight.state is State.DISCARDED else [Publish(flight)]
        flight.apply(Event.LAND)
        self.stats.landed += 1
        self._observe_flight(flight, now)
        for request in list(flight.followers):
            del flight.followers[request]
            member = self._members[request]
            del member.waits_for[generation]
            if not member.waits_for:
                del self._members[request]
                self.stats.ready += 1
                self.stats.blocks_spared += member.blocks
                self._observe_wait(request, member, Outcome.READY, None, now)
                effects.append(Left(request, Outcome.READY))
        return effects

    def cut(self, generation: int, blocks: int, now: float | None = None) -> list[Left]:
        """The load of this flight failed, but its first `blocks` blocks are there: the flight goes on as one
        of these, until the driver lands it. Followers that need more fall back; nobody else notices.

        Raises ValueError, and changes nothing, unless 0 < blocks <= those of the flight.
        """
        flight = self._flights.get(generation)
        if flight is None:
            self.stats.stale_reports += 1
            return []
        lost = flight.cut(blocks)
        self._unlist(flight, lost, blocks)
        self._next_deadline = min(self._next_deadline, self._outlived_at(flight))  # it is smaller now
        self.stats.cut += 1
        self.stats.blocks_cut += len(lost)
        return [
            self._release(request, Outcome.FELL_BACK, Reason.LEADER_FAILED, now=now)
            for request, needed in list(flight.followers.items())
            if needed > blocks
        ]

    def fail(self, generation: int, now: float | None = None, *, charged: bool = True) -> list[Left]:
        """The load of this flight failed, and nothing of it is of use: every follower falls back.

        Not `charged`: the load is lost, but nothing is wrong with the store (its owner has left, and nobody
        else can publish it). No hand-over is used up then; the deadline, which runs on, bounds the tries.
        """
        flight = self._end(generation, failed=charged)
        if flight is None:
            return []
        flight.apply(Event.FAIL)
        self.stats.failed += 1
        self._observe_flight(flight, now)
        return self._release_followers(flight, Reason.LEADER_FAILED, charged, now)

    # -- what time and operators do ----------------------------------------------------------------------

    def due(self, now: float) -> bool:
        """Whether `expire` may have something to do."""
        return now >= self._next_deadline

    def judge(self, now: float) -> None:
        """Flights that have outlived their budget are overdue; their followers stay.

        Overdue, not removed: the load still runs into its blocks. But nobody new joins it, and the next
        request for these blocks may lead (hazard H4). Costs one comparison while nothing is due.
        """
        if self.due(now):
            for flight in self._flights.values():
                self._judge(flight, now)

    def expire(self, now: float) -> list[Left]:
        """Flights are judged, and followers whose deadline has passed fall back. Costs one comparison while
        nothing is due."""
        if not self.due(now):
            return []
        self.judge(now)
        waiting = [(request, member) for request, member in self._members.items() if member.waits_for]
        effects = [
            self._release(request, Outcome.FELL_BACK, Reason.DEADLINE, now=now)
            for request, member in waiting
            if member.deadline <= now
        ]
        deadlines = [member.deadline for _, member in waiting if member.waits_for]
        deadlines += [self._outlived_at(flight) for flight in self._flights.values() if flight.joinable]
        self._next_deadline = min(deadlines, default=math.inf)
        return effects

    def expire_one(self, request: Hashable, now: float) -> list[Left]:
        """This request waits no longer: for a driver with a timer for each one. O(1) in requests."""
        member = self._members.get(request)
        flights = list(member.waits_for.values()) if member is not None else []
        if request in self._leads:
            flights.append(self._leads[request])
        for flight in flights:
            self._judge(flight, now)
        if not self.waiting(request):
            return []
        return [self._release(request, Outcome.FELL_BACK, Reason.DEADLINE, now=now)]

    def overdue_at(self, flight: Flight, now: float) -> float:
        """When the flight's budget ends; if that is not after `now`, it is overdue from here on.

        For a driver with one timer for the earliest budget.
        """
        self._judge(flight, now)
        return self._outlived_at(flight)

    def reset(self, now: float | None = None) -> list[Left]:
        """The caches are being reset: no flight in the air may be joined or published any more.

        That says nothing against the store, so no hand-over is used up.
        """
        effects: list[Left] = []
        for flight in self._flights.values():
            if flight.state is not State.DISCARDED:
                self.stats.discarded += 1
            self._unlist(flight, flight.hashes)
            flight.apply(Event.RESET)
            effects += self._release_followers(flight, Reason.RESET, charged=False, now=now)
        return effects

    # -- inside ------------------------------------------------------------------------------------------

    def _end(self, generation: int, failed: bool = False) -> Flight | None:
        flight = self._flights.pop(generation, None)
        if flight is None:
            self.stats.stale_reports += 1
            return None
        self._unlist(flight, flight.hashes)
        if self._leads.get(flight.leader) is flight:
            del self._leads[flight.leader]
            if failed and (member := self._members.get(flight.leader)) is not None:
                member.handovers += 1  # as for its followers: or it could lead a broken key for ever
        self.stats.fan_in[flight.fan_in] += 1
        return flight

    def _outlived_at(self, flight: Flight) -> float:
        return flight.started + self.budget_s(len(flight.hashes))

    def _judge(self, flight: Flight, now: float) -> None:
        """A flight is overdue once it has run for the budget of its own size: a follower in a hurry, or with
        little time left after a hand-over, does not speak for all (J2)."""
        if flight.joinable and self._outlived_at(flight) <= now:
            self.stats.overdue += 1
            self._unlist(flight, flight.hashes)
            flight.apply(Event.OVERDUE)

    def _list(self, flight: Flight, now: float, over: bool) -> None:
        """Point each hash at the flight, unless another one loads it that should land no later (not `over`).

        hashes              a  b  c  d  e  f
        flight 1 loads      1  1  1  1
        flight 2 loads            2  2  2  2
        2 lands sooner:     1  1  2  2  2  2     1 is no longer whole
        2 lands later:      1  1  1  1  2  2     2 is not whole
        """
        expected = self.forecast.remaining_s(flight, now)
        overtaken: dict[Flight, bool] = {flight: False}  # a hash that it has twice stays where it is
        for index, block_hash in enumerate(flight.hashes):
            holder, place = self._pending.setdefault(block_hash, (flight, index))
            if holder is flight and place == index:
                continue  # nobody else loads it
            if holder not in overtaken:
                overtaken[holder] = over or self.forecast.remaining_s(holder, now) > expected
                self.stats.overtook += overtaken[holder]
            loser = holder if overtaken[holder] else flight
            loser.whole = False
            if overtaken[holder]:
                self._pending[block_hash] = (flight, index)

    def _unlist(self, flight: Flight, hashes: Sequence[Hashable], first: int = 0) -> None:
        """Take these of its blocks, which begin with its block `first`, out of the table."""
        for index, block_hash in enumerate(hashes, first):
            if self._pending.get(block_hash) == (flight, index):
                del self._pending[block_hash]

    def _release_followers(
        self, flight: Flight, reason: Reason, charged: bool = True, now: float | None = None
    ) -> list[Left]:
        followers = list(flight.followers)
        return [self._release(request, Outcome.FELL_BACK, reason, charged, now) for request in followers]

    def _release(
        self,
        request: Hashable,
        outcome: Outcome,
        reason: Reason | None = None,
        charged: bool = True,
        now: float | None = None,
    ) -> Left:
        """Take the request out of every flight it waits for."""
        member = self._members[request]
        for flight in member.waits_for.values():
            del flight.followers[request]
        member.waits_for.clear()
        if outcome is Outcome.CANCELLED:
            self.stats.cancelled += 1
        else:
            assert reason is not None
            self.stats.fell_back[reason] += 1
            member.handovers += charged
        self._observe_wait(request, member, outcome, reason, now)
        return Left(request, outcome, reason)

    def _observe_flight(self, flight: Flight, now: float | None) -> None:
        if now is not None:
            landed = flight.state is State.LANDED
            took = now - flight.started
            self.observed.flights.append(Flown(landed, took, len(flight.hashes), flight.fan_in))

    def _observe_wait(
        self, request: Hashable, member: _Member, outcome: Outcome, reason: Reason | None, now: float | None
    ) -> None:
        if now is not None:
            wait = Wait(request, outcome, reason, now - member.since, now, member.blocks)
            self.observed.waits.append(wait)

    def __repr__(self) -> str:
        return (
            f"<PendingBlockTable blocks={len(self._pending)} flights={list(self._flights.values())!r}"
            f" members={sorted(map(str, self._members))!r}>"
        )
