"""The pending-block table, method by method: how followers leave and flights end."""

import math

import pytest

from singleflight.core.flight import State
from singleflight.core.table import Publish, Segment


def blocks(first: int, last: int) -> list[int]:
    """Hashes first..last, both included, as in "leader 1-8"."""
    return list(range(first, last + 1))


class TestLeave:
    @pytest.mark.parametrize("request_id", ["never seen", None, 42])
    def test_unknown_requests_are_fine(self, world, request_id):
        world.lead("L", [1])
        before = world.picture()
        assert world.table.leave(request_id) == []
        assert world.picture() == before

    def test_a_cancelled_follower_takes_only_itself_out(self, world, cancelled, ready):
        """Hazard H2: it does not remove the key; whoever comes next joins the same load."""
        flight = world.lead("L", [1])
        for follower in "ABC":
            world.join(follower, [1])
        assert world.table.leave("B") == cancelled("B")
        assert world.table.leave("B") == []
        world.join("D", [1])
        assert world.table.land(flight.generation) == [Publish(flight), *ready("A", "C", "D")]
        assert (world.stats.flights, world.stats.cancelled) == (1, 1)

    def test_a_follower_of_two_flights_leaves_both(self, world, cancelled):
        a, b = world.lead("A", [1]), world.lead("B", [2])
        world.join("F", [1, 2])
        assert world.table.leave("F") == cancelled("F")
        assert not a.followers
        assert not b.followers

    def test_the_leader_is_aborted_and_its_load_still_serves_everyone(self, world, ready):
        """Hazard H1: orphaned, joined late, landed, published."""
        flight = world.lead("L", [1])
        world.join("F", [1])
        assert world.table.leave("L") == []
        assert flight.state is State.ORPHANED
        assert world.table.leads("L") is None
        world.join("late", [1])
        assert world.table.land(flight.generation) == [Publish(flight), *ready("F", "late")]
        assert world.stats.orphaned == 1
        assert world.leftovers() == []

    def test_a_leader_that_also_follows_leaves_as_both(self, world, cancelled):
        first = world.lead("A", blocks(1, 8))
        world.join("B", blocks(1, 12))
        second = world.lead("B", blocks(9, 12))
        assert world.table.leave("B") == cancelled("B")
        assert second.state is State.ORPHANED
        assert not first.followers
        assert world.run(blocks(1, 12)) == [Segment(first, 0, 8), Segment(second, 0, 4)]

    @pytest.mark.parametrize("state", [State.OVERDUE, State.DISCARDED], ids=lambda s: s.name)
    def test_the_leader_of_a_flight_nobody_may_join(self, world, state):
        flight = world.lead("L", [1])
        world.join("F", [1])
        world.expire(60) if state is State.OVERDUE else world.table.reset()
        assert world.table.leave("L") == []
        assert (flight.state, world.stats.orphaned) == (state, 0)
        assert world.lead("L", [1]).generation != flight.generation

    def test_is_forgotten_with_its_hand_overs_and_deadline(self, world):
        world.lead("L", [1])
        world.join("F", [1])
        world.expire(60)
        assert not world.table.may_join("F", world.now)
        assert world.table.leave("F") == []
        assert world.table.may_join("F", world.now)


class TestLand:
    def test_publishes_before_it_releases_and_in_order_of_arrival(self, world, ready):
        flight = world.lead("L", blocks(1, 8))
        for follower in ("z", "a", "m"):
            world.join(follower, blocks(1, 8))
        assert world.table.land(flight.generation) == [Publish(flight), *ready("z", "a", "m")]
        assert flight.state is State.LANDED
        assert world.leftovers() == []

    def test_does_not_need_its_leader_or_a_follower(self, world):
        """Hazard H5: a load that nobody waits for any more is still worth publishing."""
        flight = world.lead("L", [1])
        world.join("F", [1])
        world.table.leave("L")
        world.table.leave("F")
        assert world.table.land(flight.generation) == [Publish(flight)]

    def test_an_overdue_flight_is_published_for_those_who_still_wait(self, world, ready, too_late):
        flight = world.lead("L", [1])
        world.join("early", [1])
        world.now += 5
        world.join("late", [1])
        assert world.expire(3.25) == too_late("early")
        assert world.table.land(flight.generation) == [Publish(flight), *ready("late")]

    def test_an_old_flight_lands_while_a_newer_one_loads_the_same_blocks(self, world):
        """Hazard H4: each completion touches only its own entries."""
        old = world.lead("L", blocks(1, 8))
        world.join("F", blocks(1, 8))
        world.expire(60)
        new = world.lead("M", blocks(1, 8))
        world.join("R", blocks(1, 8))
        assert world.table.land(old.generation) == [Publish(old)]
        assert [world.table.find(h) for h in blocks(1, 8)] == [(new, i) for i in range(8)]
        assert world.run(blocks(1, 8)) == [Segment(new, 0, 8)]
        assert world.table.leads("M") is new
        assert world.table.waiting("R")

    def test_the_same_request_leads_again_while_its_old_flight_still_writes(self, world):
        old = world.lead("L", [1, 2])
        world.join("F", [1])
        world.expire(60)
        world.table.leave("L")
        new = world.lead("L", [1, 2])
        world.table.land(old.generation)
        assert world.table.leads("L") is new
        assert len(world.table) == 2


class TestStaleReports:
    @pytest.mark.parametrize("report", ["land", "fail"])
    @pytest.mark.parametrize("ended_by", ["land", "fail"])
    def test_a_second_report_is_counted_and_ignored(self, world, report, ended_by):
        flight = world.lead("L", [1])
        getattr(world.table, ended_by)(flight.generation)
        newer = world.lead("M", [1])
        world.join("F", [1])
        assert getattr(world.table, report)(flight.generation) == []
        assert world.stats.stale_reports == 1
        assert world.stats.landed + world.stats.failed == 1
        assert world.table.find(1) == (newer, 0)
        assert world.table.waiting("F")

    @pytest.mark.parametrize("report", ["land", "fail"])
    @pytest.mark.parametrize("generation", [0, -1, 99])
    def test_a_generation_that_never_was(self, world, report, generation):
        assert getattr(world.table, report)(generation) == []
        assert world.stats.stale_reports == 1


class TestFail:
    def test_releases_everyone_at_once_and_publishes_nothing(self, world, leader_failed):
        flight = world.lead("L", blocks(1, 8))
        world.join("F", blocks(1, 4))
        world.join("G", blocks(1, 12))
        assert world.table.fail(flight.generation) == leader_failed("F", "G")
        assert flight.state is State.FAILED
        assert len(world.table) == 0
        assert world.table.leads("L") is None

    def test_a_retry_from_the_failure_handler_does_not_meet_the_failed_flight(self, world):
        """Hazard H8."""
        flight = world.lead("L", [1])
        world.join("F", [1])
        for effect in world.table.fail(flight.generation):
            assert world.run([1]) == []
            assert world.lead(effect.request, [1]) is not None

    def test_one_of_two_flights_fails_and_the_follower_is_out_of_both(self, world, leader_failed):
        a, b = world.lead("A", [1]), world.lead("B", [2])
        world.join("F", [1, 2])
        world.join("G", [2])
        assert world.table.fail(a.generation) == leader_failed("F")
        assert list(b.followers) == ["G"]

    def test_a_discarded_flight_has_nobody_left_to_tell(self, world):
        flight = world.lead("L", [1])
        world.join("F", [1])
        world.table.reset()
        assert world.table.fail(flight.generation) == []
        assert (world.stats.failed, world.leftovers()) == (1, ["_members"])

    def test_a_load_that_is_lost_without_fault_costs_nobody_a_handover(self, world):
        """Park mode: the owner left, and nobody else can publish its load. The store is not to blame."""
        for leader in "ABC":
            flight = world.lead(leader, [1])
            world.join("F", [1])
            world.table.leave(leader)
            world.table.fail(flight.generation, charged=False)
        assert world.table.may_join("F", world.now)
        world.lead("D", [1])
        world.join("F", [1])
        assert world.table.waiting("F")


class TestExpire:
    def test_nothing_an_instant_before_the_deadline_and_once_at_it(self, world, too_late):
        flight = world.lead("L", blocks(1, 4))
        world.join("F", blocks(1, 4))
        deadline = world.now + 9.0
        assert world.table.expire(math.nextafter(deadline, 0)) == []
        assert flight.joinable
        assert world.table.expire(deadline) == too_late("F")
        assert flight.state is State.OVERDUE
        assert (len(world.table), world.stats.overdue) == (0, 1)
        assert world.table.expire(deadline) == world.table.expire(deadline + 1000) == []

    def test_a_small_share_of_a_long_load_waits_as_long_as_the_load_may_take(self, world):
        """Blocks become ready with their whole flight, so its size sets the budget, not the follower's."""
        flight = world.lead("L", blocks(1, 40))
        world.join("F", blocks(1, 2))
        assert world.expire(17.75) == []
        assert flight.joinable
        assert len(world.expire(0.25)) == 1

    def test_flights_of_one_run_add_up_and_each_counts_once(self, world):
        world.lead("A", blocks(1, 4))
        world.lead("B", blocks(5, 12))
        world.join("F", [1, 3, 4, 5])  # two segments of A and one of B
        assert [len(world.expire(after)) for after in (10.75, 0.25)] == [0, 1]

    def test_a_hand_over_does_not_restart_the_deadline(self, world, leader_failed, too_late):
        first = world.lead("L", [1])
        world.join("F", [1])
        world.now += 8
        assert world.table.fail(first.generation) == leader_failed("F")
        world.lead("M", [1])
        world.join("F", [1])
        assert world.expire(0.25) == too_late("F")

    def test_others_keep_their_own_deadlines(self, world, too_late):
        world.lead("L", [1])
        for follower in "ABC":
            world.join(follower, [1])
            world.now += 2
        start = world.now - 6
        for follower, when in zip("ABC", (8.25, 10.25, 12.25), strict=True):
            assert world.table.expire(math.nextafter(start + when, 0)) == []
            assert world.table.expire(start + when) == too_late(follower)

    def test_several_at_once_in_order_of_arrival(self, world, too_late):
        world.lead("L", [1])
        world.join("B", [1])
        world.join("A", [1])
        assert world.expire(1000) == too_late("B", "A")
        assert world.stats.overdue == 1

    def test_a_stuck_flight_does_not_hold_up_the_others(self, world, too_late, ready):
        """Hazard J3."""
        world.lead("stuck", [0])
        world.join("F", [0])
        healthy = [world.lead(f"L{i}", [i]) for i in range(1, 50)]
        for i in range(1, 50):
            world.join(f"F{i}", [i])
        for i, flight in enumerate(healthy, 1):
            assert world.table.land(flight.generation) == [Publish(flight), *ready(f"F{i}")]
        assert world.expire(60) == too_late("F")
        assert len(world.table) == 0

    def test_an_earlier_deadline_that_joins_later_is_seen(self, world, too_late):
        world.lead("big", blocks(1, 40))
        world.lead("small", [99])
        world.join("patient", blocks(1, 40))
        world.now += 1
        world.join("hasty", [99])
        assert world.expire(8.25) == too_late("hasty")
        assert world.expire(8.75) == too_late("patient")

    def test_an_expired_follower_does_not_hide_a_later_one(self, world, too_late):
        """What is due next is recomputed from those who still wait."""
        world.lead("L", [1])
        world.join("A", [1])
        world.now += 1
        world.join("B", [1])
        world.now -= 1
        assert world.expire(8.25) == too_late("A")
        assert world.expire(0.5) == []
        assert world.expire(0.5) == too_late("B")

    def test_costs_one_comparison_while_nothing_is_due(self, world):
        world.lead("L", [1])
        world.join("F", [1])
        world.table._members = None  # any look at the members would raise
        assert world.expire(8) == []

    def test_looks_at_nobody_again_once_nobody_waits(self, world):
        world.lead("L", [1])
        world.join("F", [1])
        world.expire(60)
        world.table._members = None
        assert world.expire(1000) == []


class TestReset:
    def test_followers_fall_back_and_the_landing_is_never_published(self, world, was_reset):
        a, b = world.lead("A", [1, 2]), world.lead("B", [3])
        world.join("F", [1, 2, 3])
        world.join("G", [3])
        assert world.table.reset() == was_reset("F", "G")
        assert len(world.table) == 0
        assert world.table.land(a.generation) == world.table.land(b.generation) == []
        assert (world.stats.discarded, world.stats.landed) == (2, 2)

    def test_new_flights_of_the_same_blocks_are_not_affected_by_the_old_ones(self, world, ready):
        old = world.lead("L", [1])
        world.table.reset()
        new = world.lead("M", [1])
        world.join("F", [1])
        assert world.table.land(old.generation) == []
        assert world.table.land(new.generation) == [Publish(new), *ready("F")]

    def test_costs_nobody_a_handover(self, world):
        """Three resets in a row say nothing against the store: the request may still join and lead."""
        for leader in "ABC":
            world.lead(leader, [1])
            world.join("F", [1])
            world.table.reset()
        assert world.table.may_join("F", world.now)
        assert world.lead("F", [1]) is not None

    def test_twice_counts_each_flight_once(self, world):
        world.lead("L", [1])
        assert world.table.reset() == world.table.reset() == []
        assert world.stats.discarded == 1

    def test_an_orphan_and_an_overdue_flight(self, world):
        orphan, overdue = world.lead("A", [1]), world.lead("B", [2])
        world.join("F", [2])
        world.expire(60)
        world.table.leave("A")
        world.table.reset()
        assert orphan.state is overdue.state is State.DISCARDED
        assert world.table.land(orphan.generation) == world.table.land(overdue.generation) == []

    def test_on_an_idle_server(self, world):
        before = world.picture()
        assert world.table.reset() == []
        assert world.picture() == before
