"""A load that fails in part lands in part: the flight is cut to its first blocks and goes on."""

import pytest

from singleflight.core.flight import State
from singleflight.core.table import Publish


def blocks(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


class TestCut:
    def test_whoever_needs_only_what_is_there_is_ready_when_it_lands(self, world, ready, leader_failed):
        flight = world.lead("L", blocks(1, 8))
        world.join("whole", blocks(1, 8))
        world.join("just", blocks(1, 5))
        world.join("less", blocks(1, 2))
        world.join("more", blocks(1, 6))
        assert world.table.cut(flight.generation, 5) == leader_failed("whole", "more")
        assert world.table.land(flight.generation) == [Publish(flight), *ready("just", "less")]
        assert flight.hashes == (1, 2, 3, 4, 5)
        assert flight.destination == ("L:0", "L:1", "L:2", "L:3", "L:4")
        assert (world.stats.cut, world.stats.blocks_cut, world.stats.landed, world.stats.failed) == (
            1,
            3,
            1,
            0,
        )
        assert world.leftovers() == ["_members"], "hand-overs of those that fell back"

    @pytest.mark.parametrize("there", range(1, 9))
    def test_at_every_place(self, world, there):
        flight = world.lead("L", blocks(1, 8))
        for n in blocks(1, 8):
            world.join(f"F{n}", blocks(1, n))
        left = [effect.request for effect in world.table.cut(flight.generation, there)]
        assert left == [f"F{n}" for n in blocks(there + 1, 8)]
        published, *others = world.table.land(flight.generation)
        assert len(published.flight.hashes) == there
        assert [effect.request for effect in others] == [f"F{n}" for n in blocks(1, there)]

    def test_what_is_lost_may_be_led_anew_at_once_and_the_rest_may_still_be_joined(self, world, ready):
        flight = world.lead("L", blocks(1, 8))
        world.table.cut(flight.generation, 5)
        segments = world.join("F", blocks(1, 8))
        assert [(s.flight, s.start, s.length) for s in segments] == [(flight, 0, 5)]
        newer = world.lead("F", blocks(6, 8))
        assert world.run(blocks(1, 8))[1].flight is newer
        assert world.table.land(flight.generation) == [Publish(flight), *ready("F")]
        assert world.table.find(6) == (newer, 0)

    def test_what_is_known_of_the_next_blocks_is_forgotten(self, world):
        flight = world.lead("L", blocks(1, 4), hit=5, miss=6)
        world.table.cut(flight.generation, 2)
        (segment,) = world.run(blocks(1, 5))
        for block in (3, 5, 6):
            assert not segment.known_hit(block)
            assert not segment.known_miss(block)

    def test_of_two_adoptions_from_one_flight_the_longer_one_counts(self, world, leader_failed):
        flight = world.lead("L", blocks(1, 8))
        short, long = world.run(blocks(1, 2))[0], world.run(blocks(1, 6))[0]
        world.table.attach("F", [long, short], world.now)
        assert world.table.cut(flight.generation, 4) == leader_failed("F")

    def test_who_falls_back_is_out_of_its_other_flights_too(self, world, leader_failed, ready):
        a, b = world.lead("A", blocks(1, 4)), world.lead("B", blocks(5, 8))
        world.join("F", blocks(1, 8))
        world.join("G", blocks(1, 2))
        assert world.table.cut(a.generation, 2) == leader_failed("F")
        assert not b.followers
        assert world.table.land(a.generation) == [Publish(a), *ready("G")]

    def test_an_orphan_and_an_overdue_flight_stay_what_they_are(self, world):
        orphan, overdue = world.lead("A", blocks(1, 4)), world.lead("B", blocks(5, 8))
        world.expire(60)
        other = world.lead("C", blocks(11, 14))
        world.table.leave("C")
        for flight, state in ((overdue, State.OVERDUE), (other, State.ORPHANED), (orphan, State.OVERDUE)):
            world.table.cut(flight.generation, 3)
            assert flight.state is state
            assert world.table.land(flight.generation) == [Publish(flight)]

    def test_what_a_reset_has_discarded_is_published_in_no_part(self, world):
        flight = world.lead("L", blocks(1, 4))
        world.table.reset()
        assert world.table.cut(flight.generation, 2) == []
        assert world.table.land(flight.generation) == []

    def test_it_is_overdue_when_a_flight_of_its_size_would_be(self, world):
        """A complete load that waits for the one it stands on keeps its place only for so long."""
        flight = world.lead("L", blocks(1, 40))
        world.table.cut(flight.generation, 4)
        world.expire(8.75)
        assert flight.state is State.LOADING
        world.expire(0.25)
        assert flight.state is State.OVERDUE

    @pytest.mark.parametrize("there", [-1, 0, 9])
    def test_to_no_block_or_more_than_there_are_is_refused(self, world, there):
        flight = world.lead("L", blocks(1, 8))
        world.join("F", blocks(1, 8))
        with world.refuses(f"to {there} blocks"):
            world.table.cut(flight.generation, there)
