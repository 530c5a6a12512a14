"""Single waits and flights, as histograms see them."""

from singleflight.core.stats import REMEMBERED, Flown, Outcome, Reason, Wait


def test_a_wait_that_ends_well_and_the_flight_it_was_for(world):
    flight = world.lead("a", "xyz")
    world.now += 1.0
    world.join("b", "xy")
    world.now += 0.5
    world.table.land(flight.generation, world.now)
    assert list(world.table.observed.waits) == [Wait("b", Outcome.READY, None, 0.5, world.now, 2)]
    assert list(world.table.observed.flights) == [Flown(True, 1.5, 3, 2)]
    assert world.stats.blocks_spared == 2


def test_a_failed_flight_and_a_wait_that_came_to_nothing(world):
    flight = world.lead("a", "xyz")
    world.join("b", "xy")
    world.now += 2.0
    world.table.fail(flight.generation, world.now)
    reason = Reason.LEADER_FAILED
    assert list(world.table.observed.waits) == [Wait("b", Outcome.FELL_BACK, reason, 2.0, world.now, 2)]
    assert list(world.table.observed.flights) == [Flown(False, 2.0, 3, 2)]
    assert (world.stats.blocks_adopted, world.stats.blocks_spared) == (2, 0)


def test_a_second_attachment_is_a_wait_of_its_own(world):
    """The deadline counts from the first attachment; what is observed is how long each one took."""
    first = world.lead("a", "xy")
    world.join("b", "xy")
    world.now += 1.0
    world.table.fail(first.generation, world.now)
    second = world.lead("c", "xy")
    world.join("b", "xy")
    world.now += 0.25
    world.table.land(second.generation, world.now)
    assert [wait.seconds for wait in world.table.observed.waits] == [1.0, 0.25]
    assert (world.stats.blocks_adopted, world.stats.blocks_spared) == (4, 2)


def test_every_way_out_is_observed_with_its_time(world):
    for name, leave in {
        "aborted": lambda: world.table.leave("aborted", world.now),
        "late": lambda: world.table.expire(world.now + 100),
        "reset": lambda: world.table.reset(world.now),
    }.items():
        world.lead(f"leader of {name}", [name])
        world.join(name, [name])
        leave()
    waits = {wait.request: (wait.outcome, wait.reason, wait.seconds) for wait in world.table.observed.waits}
    assert waits == {
        "aborted": (Outcome.CANCELLED, None, 0.0),
        "late": (Outcome.FELL_BACK, Reason.DEADLINE, 100.0),
        "reset": (Outcome.FELL_BACK, Reason.RESET, 0.0),
    }


def test_who_does_not_say_when_observes_nothing_but_counts(world):
    flight = world.lead("a", "xy")
    world.join("b", "xy")
    world.table.fail(flight.generation)
    assert (len(world.table.observed.waits), len(world.table.observed.flights)) == (0, 0)
    assert (world.stats.failed, world.stats.fell_back[Reason.LEADER_FAILED]) == (1, 1)


def test_a_driver_that_never_takes_them_does_not_grow(world):
    for _ in range(REMEMBERED + 1):
        flight = world.lead("a", "x")
        world.table.land(flight.generation, world.now)
    assert len(world.table.observed.flights) == REMEMBERED


def test_how_many_wait_and_fly_now(world):
    assert (world.stats.waiting, world.table.in_air) == (0, 0)
    flight = world.lead("a", "xy")
    world.join("b", "xy")
    world.join("c", "x")
    assert (world.stats.waiting, world.table.in_air) == (2, 1)
    world.table.leave("b", world.now)
    assert (world.stats.waiting, world.table.in_air) == (1, 1)
    world.table.land(flight.generation, world.now)
    assert (world.stats.waiting, world.table.in_air) == (0, 0)


def test_a_wait_for_a_load_that_was_complete_early_is_not_negative(world):
    """It lands once what it stands on has landed; who attached in between waited from then on. What is
    learned is what the load took."""
    flight = world.lead("a", "xy")
    world.now += 1.0
    ended = world.now
    world.now += 1.0
    world.join("b", "xy")
    world.now += 0.5
    world.table.land(flight.generation, world.now, ended=ended)
    assert [wait.seconds for wait in world.table.observed.waits] == [0.5]
    assert [flown.seconds for flown in world.table.observed.flights] == [2.5]
    assert world.table._slowest_s == 1.0


def test_a_flight_that_failed_in_part_is_observed_and_teaches_nothing(world):
    flight = world.lead("a", "xyz")
    world.join("b", "x")
    world.now += 0.5
    world.table.cut(flight.generation, 1, world.now)
    world.table.land(flight.generation, world.now, learn=False)
    assert [wait.seconds for wait in world.table.observed.waits] == [0.5]
    assert len(world.table.observed.flights) == 1
    assert world.table._slowest_s == 0.0
