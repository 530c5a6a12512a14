"""Cohorts from beginning to end: stampedes, hand-overs, leaks."""

import random
from collections import Counter
from itertools import permutations

import pytest

from singleflight.core.table import Left, Publish


def come_back(world, request: str, block: int) -> str:
    """What a driver does with a request that needs one cold block."""
    if not world.table.may_join(request, world.now):
        assert world.lead(request, [block]) is None
        return "alone"
    if world.run([block]):
        world.join(request, [block])
        return "attached"
    world.lead(request, [block])
    return "leads"


class TestNeverAStampede:
    """Hazard E7: 32 followers and a leader that fails."""

    @pytest.fixture
    def cohort(self, world) -> list[str]:
        world.lead("L", [1])
        followers = [f"F{i}" for i in range(32)]
        for follower in followers:
            world.join(follower, [1])
        return followers

    def test_one_leads_again_and_all_others_attach(self, world, cohort, leader_failed, ready):
        assert world.table.fail(1) == leader_failed(*cohort)
        assert Counter(come_back(world, f, 1) for f in cohort) == {"leads": 1, "attached": 31}
        flight = world.table.leads("F0")
        assert world.table.land(flight.generation) == [Publish(flight), *ready(*cohort[1:])]
        assert world.stats.flights == 2

    def test_a_key_that_always_fails_costs_two_shared_loads_then_everyone_goes_alone(self, world, cohort):
        world.table.fail(1)
        first_round = Counter(come_back(world, f, 1) for f in cohort)
        world.table.fail(2)
        second_round = Counter(come_back(world, f, 1) for f in cohort)
        assert (first_round, second_round) == ({"leads": 1, "attached": 31}, {"alone": 32})
        assert (world.stats.flights, world.stats.alone) == (2, 32)

    def test_the_new_leader_is_aborted_too(self, world, cohort, ready):
        world.table.fail(1)
        for follower in cohort:
            come_back(world, follower, 1)
        world.table.leave("F0")
        assert world.table.land(2)[1:] == ready(*cohort[1:])

    def test_whoever_leads_is_aborted_fifteen_times_in_a_row(self, world, cohort, ready):
        """Hazard H6: the load belongs to no request, so the survivors need no election."""
        gone = ["L", *cohort[:15]]
        for request in gone:
            world.table.leave(request)
        assert world.table.land(1)[1:] == ready(*cohort[15:])
        assert world.stats.flights == 1


@pytest.mark.parametrize("order", list(permutations("ABC")), ids="".join)
def test_interleaved_members_release_only_their_own_reference(world, order, cancelled):
    """Hazard J4."""
    flights = [world.lead(f"L{i}", [i]) for i in range(3)]
    wants = {"A": [0, 1], "B": [1, 2], "C": [0, 1, 2]}
    for request, blocks in wants.items():
        world.join(request, blocks)
    for n, request in enumerate(order, 1):
        assert world.table.leave(request) == cancelled(request)
        still = [r for r in wants if r not in order[:n]]
        for block, flight in enumerate(flights):
            assert list(flight.followers) == [r for r in still if block in wants[r]]


def test_ten_thousand_random_steps_leave_nothing_behind(world):
    """Hazards D2, F3, J1: whatever the order, every attach has one outcome and memory returns to zero."""
    rng = random.Random(20)
    table, attached, left = world.table, Counter(), Counter()

    def note(effects):
        left.update(e.request for e in effects if isinstance(e, Left))

    for _ in range(10_000):
        world.now += rng.random() / 2
        request = f"r{rng.randrange(40)}"
        first = rng.randrange(12)
        prompt = list(range(first, first + rng.randrange(1, 8)))
        note(table.expire(world.now))
        match rng.randrange(7):
            case 0 | 1 if table.leads(request) is None:
                world.lead(request, prompt)
            case 2 | 3 if not table.waiting(request) and table.may_join(request, world.now):
                segments = [s for s in world.run(prompt) if s.flight is not table.leads(request)]
                if segments:
                    table.attach(request, segments, world.now)
                    attached[request] += 1
            case 4 | 6:
                note(table.leave(request))
            case 5 if table._flights:
                report = rng.choice([table.land, table.land, table.fail])
                note(report(rng.choice(list(table._flights))))
            case _ if rng.random() < 0.02:
                note(table.reset())
    assert min(world.stats.ready, world.stats.cancelled, *world.stats.fell_back.values()) > 20
    for generation in list(table._flights):
        note(table.land(generation))
    for n in range(40):
        note(table.leave(f"r{n}"))
    assert left == attached
    assert world.leftovers() == []
    assert world.stats.flights == world.stats.landed + world.stats.failed == sum(world.stats.fan_in.values())
