"""What a load is expected to take, and whether waiting for one is expected to pay."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singleflight.core.estimate import LoadTimes
from singleflight.core.fit import ENOUGH, OUTLIER, WINDOW
from singleflight.core.flight import State
from singleflight.core.table import Publish, Segment

LATENCY_S, PER_BLOCK_S = 0.25, 0.125


def learned(*loads: tuple[float, float]) -> LoadTimes:
    times = LoadTimes()
    for blocks, seconds in loads:
        times.observe(blocks, seconds)
    return times


class TestLoadTimes:
    @given(
        st.lists(st.integers(250, 250 * int(OUTLIER)), min_size=ENOUGH, max_size=60),
        st.floats(0, 10),
        st.floats(0, 1),
        st.integers(1, 1000),
    )
    def test_a_line_without_noise_is_found(self, seen, latency, per_block, asked):
        """No load takes more than OUTLIER times another: while all were of one size, that would be cut."""
        times = learned(*((n, latency + per_block * n) for n in seen))
        if len(set(seen[-WINDOW:])) > 1:
            assert times.seconds(asked) == pytest.approx(latency + per_block * asked, rel=1e-6, abs=1e-6)

    def test_says_nothing_before_it_has_seen_enough(self):
        loads = [(8, 1.0), (16, 2.0), (8, 1.0), (16, 2.0)]
        assert learned(*loads[: ENOUGH - 1]).seconds(8) is None
        assert learned(*loads[:ENOUGH]).seconds(8) == pytest.approx(1.0)

    def test_loads_of_one_size_say_nothing_about_size(self):
        times = learned(*[(32, 0.5)] * 9)
        assert times.seconds(1) == times.seconds(1000) == 0.5

    @given(
        st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100)), min_size=ENOUGH), st.integers(1, 1000)
    )
    def test_a_bigger_load_never_takes_less_nor_more_than_in_proportion(self, loads, blocks):
        times = learned(*loads)
        one, two = times.seconds(blocks), times.seconds(2 * blocks)
        assert 0 <= one <= two * (1 + 1e-9)
        assert two <= 2 * one * (1 + 1e-9) + 1e-9

    def test_one_load_that_hung_does_not_count_for_what_it_took(self):
        """Else everybody would run from the long flights that come after it."""
        loads = [(8, 1.0), (16, 2.0)] * 8
        before, after = learned(*loads), learned(*loads, (16, 600.0))
        assert after.seconds(16) <= before.seconds(16) * (1 + OUTLIER / 4)

    def test_a_store_that_has_become_slow_is_believed(self):
        rng = random.Random(5)
        loads = [(n, n * 0.01) for n in (rng.randint(1, 64) for _ in range(50))]
        loads += [(n, n * 0.5) for n in (rng.randint(1, 64) for _ in range(3 * WINDOW))]
        assert learned(*loads).seconds(40) == pytest.approx(20, rel=0.2)


@pytest.fixture
def known(world_with):
    """A world with four lanes in which a load is known to take 1/4 s and 1/8 s a block."""

    def make(**limits):
        world = world_with(**{"max_blocks": 1000} | limits)
        world.table.forecast.lanes = 4
        for blocks in (8, 64) * ENOUGH:
            world.table.forecast.times.observe(blocks, LATENCY_S + PER_BLOCK_S * blocks)
        return world

    return make


class TestWorthJoining:
    def worth(self, world, prompt, after=0.0, **more) -> bool:
        segments = world.run(prompt)
        return world.table.worth_joining(segments, len(prompt), world.now + after, **more)

    def test_a_short_prefix_of_a_long_flight_is_loaded_alone(self, known):
        """Hazard B3. 8 blocks of 128: 16.25 s of waiting against 2.25 s, the link shared with the flight."""
        world = known()
        world.lead("L", range(128))
        assert not self.worth(world, range(8))

    def test_the_same_prefix_is_waited_for_when_the_flight_is_about_to_land(self, known):
        world = known()
        world.lead("L", range(128))
        assert not self.worth(world, range(8), after=13.875)
        assert self.worth(world, range(8), after=14.125)

    @pytest.mark.parametrize(("share", "pays"), [(63, False), (64, True), (128, True)])
    def test_a_load_alone_shares_the_link_with_the_flight(self, known, share, pays):
        world = known()
        world.lead("L", range(128))
        assert self.worth(world, range(share)) is pays

    def test_a_flight_that_began_beside_a_small_one_is_not_taken_for_twice_as_long(self, known):
        world = known()
        small = world.lead("S", [999])
        world.lead("L", range(128))
        world.table.land(small.generation, world.now)
        assert self.worth(world, range(128))
        assert self.worth(world, range(66))
        assert not self.worth(world, range(64))

    def test_the_rest_of_the_prompt_counts_as_loaded_alone(self, known):
        """It shares 8 blocks and has 120 of its own to load either way."""
        world = known()
        world.lead("L", range(128))
        assert world.table.worth_joining(world.run(range(8)), 128, world.now)

    def test_whoever_loads_the_rest_after_the_wait_adds_that(self, known):
        """Two blocks of which one is shared: with attach side by side, with park one after the other."""
        world = known()
        world.lead("L", range(1))
        assert world.table.worth_joining(world.run(range(1)), 2, world.now)
        assert not world.table.worth_joining(world.run(range(1)), 2, world.now, then=2)

    def test_a_flight_that_is_late_is_waited_for(self, known):
        """linera-protocol#6700, hazard J2: a slow hour must not end the sharing."""
        world = known()
        world.lead("L", range(128))
        assert self.worth(world, range(1), after=17)

    def test_without_an_idle_lane_everybody_waits(self, known):
        world = known()
        world.lead("L", range(128))
        for i in range(3):
            assert not self.worth(world, range(1))
            world.lead(f"M{i}", [200 + i])
        assert self.worth(world, range(1))

    def test_with_nothing_learned_everybody_waits(self, world):
        world.table.forecast.lanes = 4
        world.lead("L", range(64))
        assert self.worth(world, range(1))

    def test_of_several_flights_the_last_to_land_counts(self, known):
        world = known()
        world.lead("A", range(8))
        assert self.worth(world, range(8))
        world.lead("B", range(8, 50))
        assert not self.worth(world, range(12))

    @pytest.mark.parametrize(("patience", "pays"), [(0, True), (1, False), (8, True)])
    def test_patience(self, known, patience, pays):
        world = known(join_patience=patience)
        world.lead("L", range(128))
        assert self.worth(world, range(8)) is pays


class TestLearning:
    def test_from_landings_but_not_from_loads_that_queued(self, world):
        """Two lanes: the third flight waits for one, so how long it took says nothing about loads."""
        world.table.forecast.lanes = 2
        for turn in range(ENOUGH):
            flights = [world.lead(f"{turn}{name}", [(turn, name)]) for name in "abc"]
            for flight, seconds in zip(flights, (1.0, 1.0, 98.0), strict=True):
                world.now += seconds
                world.table.land(flight.generation, world.now)
        assert world.table.forecast.times.seconds(1) < 3

    def test_from_nothing_where_one_load_runs_at_a_time(self, world):
        """A load of one's own never overtakes another there: there is nothing to weigh."""
        for turn in range(ENOUGH):
            flight = world.lead(f"L{turn}", [turn])
            world.now += 1.0
            world.table.land(flight.generation, world.now)
        assert world.table.forecast.times.seconds(1) is None

    def test_from_no_failure(self, world):
        world.table.forecast.lanes = 2
        for turn in range(ENOUGH):
            world.table.fail(world.lead(f"L{turn}", [turn]).generation)
        assert world.table.forecast.times.seconds(1) is None


class TestOvertaking:
    def test_newcomers_join_the_flight_that_lands_sooner(self, known, ready):
        """The first of many that need a short prefix loads it alone; the others wait for that load."""
        world = known()
        long = world.lead("L", range(40))
        short = world.lead("S", range(4))
        assert world.run(range(12)) == [Segment(short, 0, 4), Segment(long, 4, 8)]
        segments = world.join("F", range(4))
        assert segments == [Segment(short, 0, 4)]
        assert world.table.land(short.generation) == [Publish(short), *ready("F")]
        assert world.run(range(4, 40)) == [Segment(long, 4, 36)]
        assert world.stats.overtook == 1

    def test_a_flight_that_lands_later_takes_nothing_over(self, known):
        world = known()
        first = world.lead("A", range(4))
        world.lead("B", range(4))
        assert world.run(range(4)) == [Segment(first, 0, 4)]
        assert world.stats.overtook == 0

    def test_one_that_serves_more_takes_over_whenever_it_lands(self, known):
        world = known()
        first = world.lead("A", range(6))
        second = world.lead("B", range(2, 9), over=True)
        assert world.run(range(9)) == [Segment(first, 0, 2), Segment(second, 0, 7)]
        assert world.stats.overtook == 1

    def test_the_end_of_either_leaves_the_other_alone(self, known):
        """Hazards H2, H4: compare-and-delete, whichever ends first and however."""
        for ends_first, left in (("long", [None, None]), ("short", [None, "long"])):
            world = known()
            flights = {"long": world.lead("L", range(40)), "short": world.lead("S", range(4))}
            world.table.fail(flights[ends_first].generation)
            found = [world.table.find(block) for block in (0, 20)]
            names = [next(n for n, f in flights.items() if f is at[0]) if at else None for at in found]
            assert names == (["short", None] if ends_first == "long" else left)


class TestOwnBudget:
    """A flight that nobody follows becomes overdue like any other: hazard H4, J2."""

    def test_a_hung_flight_without_followers_is_overdue_by_itself(self, world):
        flight = world.lead("L", range(4))
        assert world.expire(8.875) == []
        assert flight.joinable
        assert world.expire(0.125) == []
        assert (flight.state, len(world.table), world.stats.overdue) == (State.OVERDUE, 0, 1)

    def test_a_flight_that_learned_deadlines_extend_is_not(self, world_with):
        world = world_with(deadline_learned_factor=2.0)
        slow = world.lead("S", [99])
        flight = world.lead("L", range(4))
        world.now += 8
        world.table.land(slow.generation, world.now)
        assert world.expire(7.75) == []
        assert flight.joinable
        world.expire(0.25)
        assert flight.state is State.OVERDUE

    def test_one_quick_load_after_a_slow_one_hardly_shortens_it(self, world_with):
        """Ten seconds, then an instant: nine are remembered, so the budget is 18 s and not the policy's 9."""
        world = world_with(deadline_learned_factor=2.0)
        slow = world.lead("S", [99])
        world.now += 10
        world.table.land(slow.generation, world.now)
        quick = world.lead("Q", [98])
        world.table.land(quick.generation, world.now)
        assert world.table.budget_s(4) == 18.0
