"""The pending-block table against a naive model, under any order of calls.

The model is written from the design and the docstrings: plain dicts that spell out who loads what and who
waits for whom. After every step all that the table knows must equal all that the model knows.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from singleflight.core.estimate import Forecast, LoadTimes
from singleflight.core.flight import Flight
from singleflight.core.policy import Policy
from singleflight.core.stats import Outcome, Reason
from singleflight.core.table import Left, PendingBlockTable, Publish, Segment

POLICY = Policy(deadline_base_s=4, deadline_per_block_s=1, max_handovers=1, max_blocks=10)

requests = st.sampled_from("ABCDEF")
# Mostly what prompts are (a run from a common chain), sometimes anything.
prompts = st.one_of(
    st.builds(lambda first, n: list(range(first, first + n)), st.integers(0, 4), st.integers(1, 6)),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
picks = st.integers(0, 11)

LANES = 3


class Known(LoadTimes):
    """Nothing to learn: a block takes a second."""

    def seconds(self, blocks: float) -> float:
        return float(blocks)


@dataclass
class Load:
    """A load in the air."""

    real: Flight
    leader: str | None  # None once it is gone
    hashes: list[int]
    started: int
    fan_in: int = 1
    joinable: bool = True
    discarded: bool = False
    expected: int = 0  # when it should land


@dataclass
class Waiter:
    """What a request carries from its first attachment until it is ready or gone."""

    deadline: float
    waits: list[int] = field(default_factory=list)
    needs: dict[int, int] = field(default_factory=dict)  # generation -> of its first blocks, so many
    handovers: int = 0
    adopted: int = 0  # blocks, when it attached the last time


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = PendingBlockTable(POLICY, Forecast(LANES))
        self.table.forecast.times = Known()
        self.clock = 0
        self.air: dict[int, Load] = {}
        self.ended: list[Flight] = []
        self.pending: dict[int, tuple[int, int]] = {}  # hash -> (generation, index)
        self.waiters: dict[str, Waiter] = {}
        self.count: Counter[str] = Counter()
        self.fell_back: Counter[str] = Counter()
        self.fan_ins: Counter[str] = Counter()
        self.open_attachments: set[str] = set()

    # -- the model's own words ---------------------------------------------------------------------------

    def may_join(self, request: str) -> bool:
        waiter = self.waiters.get(request)
        if waiter is None:
            return True
        return waiter.handovers <= POLICY.max_handovers and self.clock < waiter.deadline

    def work(self, blocks: int) -> int:
        """Blocks on an evenly shared link until the last of so many more."""
        return blocks + sum(min(blocks, len(load.hashes)) for load in self.air.values())

    def waits(self, request: str) -> bool:
        return request in self.waiters and self.waiters[request].waits != []

    def leads(self, request: str) -> int | None:
        return next((g for g, load in self.air.items() if load.leader == request), None)

    def followers(self, generation: int) -> list[str]:
        return [r for r, waiter in self.waiters.items() if generation in waiter.waits]

    def unlist(self, generation: int) -> None:
        self.pending = {h: at for h, at in self.pending.items() if at[0] != generation}

    def falls_back(self, request: str, reason: Reason) -> Left:
        self.waiters[request].waits = []
        self.waiters[request].needs = {}
        self.waiters[request].handovers += reason is not Reason.RESET
        self.fell_back[reason.value] += 1
        return Left(request, Outcome.FELL_BACK, reason)

    def cancels(self, request: str) -> list[Left]:
        if not self.waits(request):
            return []
        self.waiters[request].waits = []
        self.waiters[request].needs = {}
        self.count["cancelled"] += 1
        return [Left(request, Outcome.CANCELLED)]

    def ends(self, generation: int) -> Load:
        load = self.air.pop(generation)
        self.unlist(generation)
        self.ended.append(load.real)
        self.fan_ins[str(load.fan_in)] += 1
        return load

    def check(self, effects: list[Any], expected: list[Any]) -> None:
        """Same effects, publications first; each follower leaves by one outcome, once."""
        publishes = [e for e in effects if isinstance(e, Publish)]
        lefts = [e for e in effects if isinstance(e, Left)]
        assert effects == publishes + lefts
        assert Counter(effects) == Counter(expected)
        for left in lefts:
            self.open_attachments.remove(left.request)

    # -- rules -------------------------------------------------------------------------------------------

    @rule(request=requests, hashes=prompts, miss=st.none() | st.integers(10, 12), over=st.booleans())
    def lead(self, request: str, hashes: list[int], miss: int | None, over: bool = False) -> None:
        destination = [(request, self.count["flights"], index) for index in range(len(hashes))]
        call = (request, hashes, destination, self.clock, miss)
        if self.leads(request) is not None:
            with pytest.raises(ValueError, match="already leads"):
                self.table.lead(*call, over=over)
            return
        flight = self.table.lead(*call, over=over)
        if not self.may_join(request):
            assert flight is None
            self.count["alone"] += 1
        elif len(self.pending) + len(hashes) > POLICY.max_blocks:
            assert flight is None
            self.count["unregistered"] += 1
        else:
            assert flight is not None
            assert flight.generation not in self.air
            assert flight.generation not in [f.generation for f in self.ended]
            assert (flight.leader, flight.miss, flight.started) == (request, miss, self.clock)
            assert flight.destination == tuple(destination)
            queues = len(self.air) >= LANES
            expected = self.clock + (len(hashes) if queues else self.work(len(hashes)))
            overtaken = set()
            for index, block in enumerate(hashes):
                if block in self.pending and self.pending[block][0] != flight.generation:
                    holder = self.pending[block][0]
                    if not over and max(self.air[holder].expected, self.clock) <= expected:
                        continue
                    overtaken.add(holder)
                elif block in self.pending:
                    continue
                self.pending[block] = (flight.generation, index)
            self.air[flight.generation] = Load(flight, request, hashes, self.clock, expected=expected)
            self.count["overtook"] += len(overtaken)
            self.count["flights"] += 1
            self.count["blocks_led"] += len(hashes)

    @precondition(lambda self: self.pending)
    @rule(pick=picks, start=picks, length=st.integers(1, 6), adopts=st.booleans())
    def join_what_is_pending(self, pick: int, start: int, length: int, adopts: bool) -> None:
        """A request that may, meets a prompt that others load; it then may lead the rest of the prompt."""
        free = [r for r in "ABCDEF" if self.may_join(r) and not self.waits(r) and self.leads(r) is None]
        if not free:
            return
        request = free[pick % len(free)]
        first = list(self.pending)[start % len(self.pending)]
        prompt = list(range(first, first + length))
        adopted = self._run_and_attach(request, prompt, 0, length)
        if adopts and adopted < length:
            self.lead(request, prompt[adopted:], None)

    @rule(request=requests, prompt=prompts, start=st.integers(0, 2), stop=st.integers(0, 6))
    def attach(self, request: str, prompt: list[int], start: int, stop: int) -> None:
        self._run_and_attach(request, prompt, start, min(stop or len(prompt), len(prompt)))

    def _run(self, prompt: list[int], start: int, stop: int) -> tuple[list[Segment], int]:
        """The pending run, and its length in blocks."""
        segments = self.table.run(prompt, start, stop)
        expected: list[tuple[int, int]] = []
        for block in prompt[start:stop]:
            if block not in self.pending:
                break
            expected.append(self.pending[block])
        assert [(s.flight.generation, s.start + i) for s in segments for i in range(s.length)] == expected
        for a, b in pairwise(segments):
            assert (a.flight, a.start + a.length) != (b.flight, b.start), "segments are as long as can be"
        return segments, len(expected)

    def _run_and_attach(self, request: str, prompt: list[int], start: int, stop: int) -> int:
        segments, expected = self._run(prompt, start, stop)
        if segments:
            self._waiting_pays_where_it_is_not_longer(segments, expected)
        self._attach(request, segments)
        return expected

    def _waiting_pays_where_it_is_not_longer(self, segments: list[Segment], blocks: int) -> None:
        wait = max(self.air[s.flight.generation].expected - self.clock for s in segments)
        alone = self.work(blocks)
        pays = len(self.air) >= LANES or max(wait, 0) <= alone
        assert self.table.worth_joining(segments, blocks, self.clock) == pays

    @rule(request=requests, pick=picks)
    def attach_to_something_seen_earlier(self, request: str, pick: int) -> None:
        seen = self.ended[-2:] + [load.real for load in self.air.values()]
        if seen:
            self._attach(request, [Segment(seen[pick % len(seen)], 0, 1)])

    def _attach(self, request: str, segments: list[Segment]) -> None:
        wanted = list(dict.fromkeys(s.flight.generation for s in segments))
        loads = [self.air.get(generation) for generation in wanted]
        allowed = (
            wanted != []
            and all(load is not None and load.joinable and load.leader != request for load in loads)
            and not self.waits(request)
            and self.may_join(request)
        )
        if not allowed:
            with pytest.raises(ValueError, match=r"nothing to attach|cannot join|waits already|goes alone"):
                self.table.attach(request, segments, self.clock)
            return
        self.table.attach(request, segments, self.clock)
        size = sum(len(self.air[generation].hashes) for generation in wanted)
        waiter = self.waiters.setdefault(request, Waiter(self.clock + 4 + size))
        waiter.waits = wanted
        waiter.needs = {
            g: max(s.start + s.length for s in segments if s.flight.generation == g) for g in wanted
        }
        for generation in wanted:
            self.air[generation].fan_in += 1
        self.count["attached"] += 1
        waiter.adopted = sum(s.length for s in segments)
        self.count["blocks_adopted"] += waiter.adopted
        self.open_attachments.add(request)

    @precondition(lambda self: self.air)
    @rule(pick=picks)
    def land(self, pick: int) -> None:
        self._land(list(self.air)[pick % len(self.air)])

    def _land(self, generation: int) -> None:
        waiting = self.followers(generation)
        load = self.ends(generation)
        self.count["landed"] += 1
        expected: list[Any] = [] if load.discarded else [Publish(load.real)]
        for request in waiting:
            self.waiters[request].waits.remove(generation)
            if not self.waiters[request].waits:
                self.count["blocks_spared"] += self.waiters.pop(request).adopted
                self.count["ready"] += 1
                expected.append(Left(request, Outcome.READY))
        self.check(self.table.land(generation), expected)

    @precondition(lambda self: self.air)
    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        generation = list(self.air)[pick % len(self.air)]
        waiting = self.followers(generation)
        load = self.ends(generation)
        self.count["failed"] += 1
        if load.leader in self.waiters:
            self.waiters[load.leader].handovers += 1
        expected = [self.falls_back(request, Reason.LEADER_FAILED) for request in waiting]
        self.check(self.table.fail(generation), expected)

    @precondition(lambda self: self.air)
    @rule(pick=picks, blocks=st.integers(1, 5))
    def cut(self, pick: int, blocks: int) -> None:
        """The load failed, but its first blocks are there."""
        generation = list(self.air)[pick % len(self.air)]
        load = self.air[generation]
        blocks = min(blocks, len(load.hashes))
        self.count["cut"] += 1
        self.count["blocks_cut"] += len(load.hashes) - blocks
        load.hashes = load.hashes[:blocks]
        self.pending = {h: at for h, at in self.pending.items() if at[0] != generation or at[1] < blocks}
        short = [r for r in self.followers(generation) if self.waiters[r].needs[generation] > blocks]
        expected = [self.falls_back(request, Reason.LEADER_FAILED) for request in short]
        self.check(self.table.cut(generation, blocks), expected)

    @rule(pick=picks, report=st.sampled_from(["land", "fail", "cut"]))
    def report_on_a_flight_that_is_not_in_the_air(self, pick: int, report: str) -> None:
        stale = [-1, 0, 10**6, *(f.generation for f in self.ended)]
        more = (1,) if report == "cut" else ()
        assert getattr(self.table, report)(stale[-1 - pick % len(stale)], *more) == []
        self.count["stale_reports"] += 1

    @rule(request=requests)
    def leave(self, request: str) -> None:
        expected = self.cancels(request)
        self.waiters.pop(request, None)
        generation = self.leads(request)
        if generation is not None:
            self.air[generation].leader = None
            self.count["orphaned"] += self.air[generation].joinable
        self.check(self.table.leave(request), expected)

    @rule(seconds=st.integers(1, 5))
    def time_passes_unnoticed(self, seconds: int) -> None:
        self.clock += seconds

    @rule(seconds=st.integers(0, 5))
    def expire(self, seconds: int) -> None:
        self.clock += seconds
        for generation, load in self.air.items():
            if load.joinable and load.started + POLICY.budget_s(len(load.hashes)) <= self.clock:
                load.joinable = False
                self.unlist(generation)
                self.count["overdue"] += 1
        expected = [
            self.falls_back(request, Reason.DEADLINE)
            for request, waiter in self.waiters.items()
            if waiter.waits and waiter.deadline <= self.clock
        ]
        self.check(self.table.expire(self.clock), expected)

    @precondition(lambda self: self.air)
    @rule(really=st.integers(0, 3))
    def reset(self, really: int) -> None:
        if really:  # a rare event, or little else would get far
            return
        for load in self.air.values():
            self.count["discarded"] += not load.discarded
            load.joinable, load.discarded = False, True
        self.pending = {}
        expected = [self.falls_back(r, Reason.RESET) for r, waiter in self.waiters.items() if waiter.waits]
        self.check(self.table.reset(), expected)

    # -- after every step --------------------------------------------------------------------------------

    @invariant()
    def pending_blocks_are_those_that_can_be_joined(self) -> None:
        assert len(self.table) == len(self.pending) <= POLICY.max_blocks
        for block in range(16):
            found = self.table.find(block)
            if block not in self.pending:
                assert found is None
                continue
            assert found is not None
            flight, index = found
            assert (flight.generation, index) == self.pending[block]
            assert flight.joinable
            assert flight.hashes[index] == block
            self._run(list(range(12)), block, 12)

    @invariant()
    def flights_and_followers_are_the_models(self) -> None:
        assert set(self.table._flights) == set(self.air)
        for generation, load in self.air.items():
            flight = load.real
            assert self.table._flights[generation] is flight
            needed = {r: self.waiters[r].needs[generation] for r in self.followers(generation)}
            assert flight.followers == needed
            assert list(flight.hashes) == load.hashes
            assert len(flight.destination) == len(load.hashes) >= max(needed.values(), default=0)
            assert (flight.fan_in, flight.joinable) == (load.fan_in, load.joinable)
            assert flight.fan_in >= 1 + len(flight.followers)
        for flight in self.ended:
            assert not flight.followers

    @invariant()
    def requests_are_where_the_model_says(self) -> None:
        for request in "ABCDEF":
            generation = self.leads(request)
            assert self.table.leads(request) is (self.air[generation].real if generation else None)
            assert self.table.waiting(request) == self.waits(request) == (request in self.open_attachments)
            assert self.table.may_join(request, self.clock) == self.may_join(request)
            member = self.table._members.get(request)
            assert (member is None) == (request not in self.waiters)
            if member is not None:
                expected = self.waiters[request]
                assert set(member.waits_for) == set(expected.waits)
                assert (member.deadline, member.handovers) == (expected.deadline, expected.handovers)

    @invariant()
    def the_books_balance(self) -> None:
        snapshot = self.table.stats.snapshot()
        fell_back, fan_in = snapshot.pop("fell_back"), snapshot.pop("fan_in")
        assert snapshot == {name: self.count[name] for name in snapshot}
        assert fell_back == {reason.value: self.fell_back[reason.value] for reason in Reason}
        assert fan_in == self.fan_ins
        done = snapshot["ready"] + snapshot["cancelled"] + sum(fell_back.values())
        assert snapshot["attached"] == done + len(self.open_attachments)
        assert self.table.stats.waiting == len(self.open_attachments)
        assert self.table.in_air == len(self.air)
        assert snapshot["flights"] == snapshot["landed"] + snapshot["failed"] + len(self.air)

    def teardown(self) -> None:
        """When all loads and all requests are over, nothing is left."""
        for generation in list(self.air):
            self._land(generation)
        for request in "ABCDEF":
            self.leave(request)
        assert not self.open_attachments
        for name, value in vars(self.table).items():
            assert not isinstance(value, dict) or not value, name


TestTable = TableMachine.TestCase
TestTable.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # it says something of the machine only
)
