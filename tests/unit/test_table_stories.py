"""Cohorts from beginning to end: stampedes, hand-overs, leaks."""

from collections import Counter
from itertools import permutations

import pytest

from singleflight.table import Publish


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
