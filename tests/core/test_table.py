"""The pending-block table, method by method: what is asked of it, and how requests enter."""

import math
from itertools import pairwise

import pytest

from singleflight.core.table import PendingBlockTable, Publish, Segment


def blocks(first: int, last: int) -> list[int]:
    """Hashes first..last, both included, as in "leader 1-8"."""
    return list(range(first, last + 1))


class TestFind:
    def test_an_idle_server_knows_nothing(self, world):
        assert len(world.table) == 0
        assert world.table.find(1) is None

    def test_points_at_the_flight_and_the_place_in_it(self, world):
        flight = world.lead("L", blocks(1, 8))
        assert world.table.find(1) == (flight, 0)
        assert world.table.find(8) == (flight, 7)
        assert world.table.find(9) is None
        assert len(world.table) == 8


class TestRun:
    @pytest.mark.parametrize(
        ("prompt", "start", "stop", "pieces"),
        [
            pytest.param(blocks(1, 8), 0, 8, [(0, 8)], id="all of it"),
            pytest.param([*blocks(1, 4), 55, 56], 0, 6, [(0, 4)], id="1-4 plus its own"),
            pytest.param(blocks(1, 12), 0, 12, [(0, 8)], id="1-12 of which 9-12 nobody loads"),
            pytest.param(blocks(1, 8), 2, 8, [(2, 6)], id="1-2 are local, the run starts in the middle"),
            pytest.param(
                [91, 92, *blocks(3, 5)], 2, 5, [(2, 3)], id="other index in the prompt than in the flight"
            ),
            pytest.param(blocks(1, 8), 0, 5, [(0, 5)], id="stops before the last token's block"),
            pytest.param(blocks(1, 8), 3, 3, [], id="nothing left to ask for"),
            pytest.param(blocks(0, 8), 0, 9, [], id="a cold block first: no run however much follows"),
            pytest.param([1, 2, 99, 4, 5], 0, 5, [(0, 2)], id="a hole ends the run"),
            pytest.param(
                [1, 2, 5, 6], 0, 4, [(0, 2), (4, 2)], id="a jump inside one flight makes two segments"
            ),
        ],
    )
    def test_against_a_leader_of_1_to_8(self, world, prompt, start, stop, pieces):
        flight = world.lead("L", blocks(1, 8))
        assert world.table.run(prompt, start, stop) == [Segment(flight, *piece) for piece in pieces]

    def test_crosses_flights_of_leaders_that_build_on_each_other(self, world):
        first, second = world.lead("A", blocks(1, 8)), world.lead("B", blocks(9, 12))
        segments = world.run(blocks(1, 14))
        assert segments == [Segment(first, 0, 8), Segment(second, 0, 4)]
        assert segments[1].destination == ("B:0", "B:1", "B:2", "B:3")

    def test_destination_is_that_of_the_segment_only(self, world):
        world.lead("L", blocks(1, 8))
        (segment,) = world.run(blocks(1, 5), start=2)
        assert segment.destination == ("L:2", "L:3", "L:4")

    def test_the_same_block_twice_in_one_flight_finds_valid_destinations(self, world):
        flight = world.lead("L", [1, 1, 2])
        assert len(world.table) == 2
        found = [s.destination for s in world.run([1, 1, 2])]
        assert found == [("L:0",), ("L:0",), ("L:2",)]
        world.table.land(flight.generation)
        assert world.leftovers() == []

    def test_blocks_that_another_flight_already_loads_keep_their_owner(self, world):
        first = world.lead("A", [3, 4])
        second = world.lead("B", blocks(1, 6))
        assert world.run(blocks(1, 6)) == [Segment(second, 0, 2), Segment(first, 0, 2), Segment(second, 4, 2)]

    @pytest.mark.parametrize("others", [[], ["x", "y"]], ids=["alone", "beside an unrelated flight"])
    def test_a_flight_that_has_its_blocks_to_itself_is_found_by_its_first(self, world_with, others):
        """A prompt of 1,000 pending blocks costs a lookup one question, not 1,000."""
        world, asked = world_with(max_blocks=2000), []

        class Block:
            def __hash__(self):
                asked.append(self)
                return id(self)

        prompt = [Block() for _ in range(1000)]
        flight = world.lead("L", prompt)
        if others:
            world.lead("M", others)
        asked.clear()
        assert world.run(prompt) == [Segment(flight, 0, 1000)]
        assert asked == prompt[:1]

    def test_asking_a_thousand_times_changes_nothing(self, world):
        """Hazard J1: lookups that never load must leave nothing behind."""
        world.lead("L", blocks(1, 8))
        before = world.picture()
        for i in range(1000):
            world.run(blocks(1, 8))
            world.table.find(i)
            world.table.may_join(f"r{i}", world.now)
            world.table.waiting(f"r{i}")
            world.table.leads(f"r{i}")
        assert world.picture() == before


class TestLead:
    def test_registers_the_flight_under_a_name_of_its_own(self, world):
        a, b = world.lead("A", [1], miss=2), world.lead("B", [5])
        assert a.generation != b.generation
        assert (a.leader, a.started, a.miss, b.miss) == ("A", world.now, 2, None)
        assert world.table.leads("A") is a
        assert (world.stats.flights, world.stats.blocks_led) == (2, 2)

    def test_what_its_lookup_has_said_of_the_next_blocks_is_known_at_its_end(self, world):
        world.lead("L", [1, 2], hit=3, miss=4)
        (whole,), (part,) = world.run([1, 2, 3]), world.run([1])
        assert [whole.known_hit(block) for block in (3, 4)] == [True, False]
        assert [whole.known_miss(block) for block in (3, 4)] == [False, True]
        assert not part.known_hit(3)
        assert not part.known_miss(4)

    def test_a_leader_cannot_lead_twice_at_a_time(self, world):
        flight = world.lead("L", [1])
        with world.refuses("'L' already leads <Flight #1 loading"):
            world.lead("L", [2])
        world.table.land(flight.generation)
        assert world.lead("L", [2]) is not None

    @pytest.mark.parametrize("full", [False, True])
    @pytest.mark.parametrize(("hashes", "destination"), [([5, 6], ["d"]), ([], [])])
    def test_a_malformed_load_is_refused_whether_or_not_there_is_room(
        self, world_with, full, hashes, destination
    ):
        world = world_with(max_blocks=1)
        if full:
            world.lead("L", [1])
        with world.refuses(r"destinations|at least one block"):
            world.table.lead("M", hashes, destination, world.now)

    def test_a_full_table_takes_no_flight_and_keeps_no_trace_of_it(self, world_with):
        """Hazard J2: the bound is a bound, and what is over it loads as in stock vLLM."""
        world = world_with(max_blocks=8)
        world.lead("A", blocks(1, 6))
        assert world.lead("B", blocks(11, 13)) is None
        assert (len(world.table), world.stats.unregistered, world.stats.flights) == (6, 1, 1)
        assert world.table.leads("B") is None
        assert world.table.find(11) is None
        assert world.lead("B", blocks(11, 12)) is not None  # exactly full is not over
        assert len(world.table) == 8

    def test_room_comes_back_when_a_flight_ends(self, world_with):
        world = world_with(max_blocks=2)
        flight = world.lead("A", [1, 2])
        assert world.lead("B", [3]) is None
        world.table.land(flight.generation)
        assert world.lead("B", [3]) is not None

    def test_the_load_completes_inside_the_submit_call(self, world):
        """Hazard H9: nothing is left behind when a flight ends at once."""
        world.table.land(world.lead("A", [1]).generation)
        world.table.fail(world.lead("B", [1]).generation)
        assert world.leftovers() == []


class TestAttach:
    def test_a_follower_of_1_to_4_that_loads_its_own_5_and_6(self, world, ready):
        """Hazard A2: it waits for the leader's flight and still leads its own."""
        flight = world.lead("L", blocks(1, 8))
        world.join("F", [*blocks(1, 4), 55, 56])
        own = world.lead("F", [55, 56])
        assert world.table.waiting("F")
        assert world.table.land(own.generation) == [Publish(own)]
        assert world.table.waiting("F")
        assert world.table.land(flight.generation) == [Publish(flight), *ready("F")]
        assert world.stats.blocks_adopted == 4

    def test_leaves_when_the_last_of_several_flights_has_landed(self, world, ready):
        a, b = world.lead("A", blocks(1, 8)), world.lead("B", blocks(9, 12))
        world.join("F", blocks(1, 12))
        assert world.table.land(b.generation) == [Publish(b)]
        assert world.table.waiting("F")
        assert world.table.land(a.generation) == [Publish(a), *ready("F")]
        assert (world.stats.attached, world.stats.blocks_adopted, world.stats.ready) == (1, 12, 1)

    def test_two_segments_of_one_flight_make_one_member(self, world, ready):
        flight = world.lead("L", blocks(1, 8))
        world.join("F", [1, 2, 5, 6])
        assert (flight.fan_in, list(flight.followers)) == (2, ["F"])
        assert world.table.land(flight.generation) == [Publish(flight), *ready("F")]

    def test_fan_in_counts_the_leader_and_never_falls(self, world):
        flight = world.lead("L", [1])
        seen = [flight.fan_in]
        for step in (
            lambda: world.join("F", [1]),
            lambda: world.table.leave("F"),
            lambda: world.join("G", [1]),
        ):
            step()
            seen.append(flight.fan_in)
        assert seen == [1, 2, 2, 3]
        world.table.land(flight.generation)
        assert world.stats.snapshot()["fan_in"] == {"3": 1}

    def test_those_who_wait_are_counted_until_the_flight_ends(self, world):
        flight = world.lead("L", [1])
        seen = []
        for step in (
            lambda: None,
            lambda: world.join("F", [1]),
            lambda: world.join("G", [1]),
            lambda: world.table.leave("F"),
            lambda: world.table.land(flight.generation),
        ):
            step()
            seen.append(world.table.followers(flight.generation))
        assert seen == [0, 1, 2, 1, 0]

    def test_nothing_to_attach_to(self, world):
        with pytest.raises(ValueError, match="nothing to attach to"):
            world.join("F", [1])
        assert world.leftovers() == []

    @pytest.mark.parametrize(
        ("ending", "says"),
        [
            (lambda w, f: w.table.land(f.generation), "cannot join"),
            (lambda w, f: w.table.fail(f.generation), "cannot join"),
            (lambda w, f: w.table.reset(), "cannot join"),
            (lambda w, f: (w.join("X", [1]), w.expire(60)), "cannot join"),
        ],
        ids=["landed", "failed", "discarded", "overdue"],
    )
    def test_a_flight_that_ended_since_the_run_was_asked_for(self, world, ending, says):
        flight = world.lead("L", [1])
        healthy = world.lead("H", [2])
        segments = world.run([2, 1]) + world.run([1])
        ending(world, flight)
        with world.refuses(says):
            world.table.attach("F", segments, world.now)
        assert "F" not in healthy.followers

    def test_its_own_flight(self, world):
        """Hazard H5: a request must not wait for itself."""
        world.lead("L", [1])
        with world.refuses("'L' cannot join"):
            world.join("L", [1])

    def test_while_it_waits_already(self, world):
        world.lead("L", [1])
        world.join("F", [1])
        with world.refuses("'F' waits already"):
            world.join("F", [1])

    def test_after_its_last_hand_over(self, world):
        for leader in "AB":
            flight = world.lead(leader, [1])
            world.join("F", [1])
            world.table.fail(flight.generation)
        world.lead("C", [1])
        with world.refuses("'F' goes alone"):
            world.join("F", [1])

    def test_a_client_retries_an_aborted_leader_under_the_same_id(self, world, ready):
        """The orphan is nobody's own flight any more: the retry joins it like anyone else."""
        flight = world.lead("L", [1])
        world.table.leave("L")
        world.join("L", [1])
        assert world.table.land(flight.generation) == [Publish(flight), *ready("L")]
        assert world.leftovers() == []


class TestMayJoin:
    def test_a_stranger_may(self, world):
        assert world.table.may_join("F", world.now)

    @pytest.mark.parametrize("bound", [0, 1, 3])
    def test_until_its_hand_overs_are_used_up(self, world_with, bound):
        world = world_with(max_handovers=bound)
        for turn in range(bound + 1):
            assert world.table.may_join("F", world.now)
            flight = world.lead(f"L{turn}", [1])
            world.join("F", [1])
            world.table.fail(flight.generation)
        assert not world.table.may_join("F", world.now)
        assert world.lead("F", [1]) is None
        assert (world.stats.alone, world.table.find(1)) == (1, None)

    def test_leading_again_and_failing_uses_up_a_hand_over_like_following(self, world, leader_failed):
        """No endless loop: whoever re-leads a broken key goes alone no later than its followers."""
        first = world.lead("L", [1])
        world.join("F", [1])
        world.join("G", [1])
        assert world.table.fail(first.generation) == leader_failed("F", "G")
        second = world.lead("F", [1])
        world.join("G", [1])
        assert world.table.fail(second.generation) == leader_failed("G")
        assert not world.table.may_join("F", world.now)
        assert not world.table.may_join("G", world.now)

    @pytest.mark.parametrize("outcome", ["land", "cut"])
    def test_only_failures_use_up_a_hand_over(self, world_with, outcome):
        world = world_with(max_handovers=0)
        world.lead("A", [1])
        world.join("B", [1, 2])
        own = world.lead("B", [2])
        if outcome == "cut":
            assert world.table.cut(own.generation, 1) == []
        world.table.land(own.generation)
        assert world.table.may_join("B", world.now)

    def test_a_broken_orphan_counts_only_once_against_a_retry_under_its_leaders_id(self, world):
        flight = world.lead("L", [1])
        world.table.leave("L")
        world.join("L", [1])
        world.table.fail(flight.generation)
        assert world.table.may_join("L", world.now)

    def test_until_its_deadline_to_the_last_instant(self, world):
        flight = world.lead("L", [1])
        world.join("F", [1])
        world.table.fail(flight.generation)
        deadline = world.now + 8.25
        assert world.table.may_join("F", math.nextafter(deadline, 0))
        assert not world.table.may_join("F", deadline)

    def test_a_request_that_became_ready_starts_afresh(self, world):
        world.lead("L", [1])
        world.join("F", [1])
        world.table.fail(1)
        world.lead("M", [1])
        world.join("F", [1])
        world.table.land(2)
        assert world.table.may_join("F", world.now + 1000)


class TestMayRetry:
    """The cohort of a failed load gets one try at blocks that are known to be broken."""

    def test_only_whoever_has_seen_a_load_fail_and_has_hand_overs_left(self, world_with):
        world = world_with(max_handovers=2)
        seen = [world.table.may_retry("F")]
        for turn in range(3):
            flight = world.lead(f"L{turn}", [1])
            world.join("F", [1])
            seen.append(world.table.may_retry("F"))
            world.table.fail(flight.generation)
        seen.append(world.table.may_retry("F"))
        assert seen == [False, False, True, True, False]

    def test_a_reset_is_no_failure(self, world):
        world.lead("L", [1])
        world.join("F", [1])
        world.table.reset()
        assert not world.table.may_retry("F")


class TestRepr:
    def test_is_short_and_names_everyone(self, world):
        assert repr(PendingBlockTable()) == "<PendingBlockTable blocks=0 flights=[] members=[]>"
        world.lead("L", [1, 2])
        world.join("F", [1])
        assert repr(world.table) == (
            "<PendingBlockTable blocks=2 flights=[<Flight #1 loading leader='L' blocks=2 followers=['F']>]"
            " members=['F']>"
        )


def test_generations_only_grow(world):
    generations = []
    for turn in range(6):
        flight = world.lead(f"L{turn}", [turn % 2 + 10 * turn])
        generations.append(flight.generation)
        [world.table.land, world.table.fail][turn % 2](flight.generation)
    assert all(a < b for a, b in pairwise(generations))
