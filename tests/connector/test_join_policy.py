"""The join policy on a real engine: who does not wait, and what comes out. Four receive threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from singleflight.core.fit import ENOUGH
from singleflight.core.flight import State
from tests.faults.cohort import Cohort
from tests.faults.scripted_store import hang, scripted
from tests.support import BLOCK, Clock, blocks, quiescent, salts, store_prefixes

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


@pytest.fixture
def cohort(ours: Engine) -> Iterator[Cohort]:
    with quiescent(ours) as engine:
        yield Cohort(engine)


@pytest.fixture
def clock(cohort: Cohort) -> Clock:
    """The adapter's clock, standing still until the test moves it."""
    moved: Clock = cohort.engine.connector.layer._clock
    return moved


@pytest.fixture
def a_block_takes_a_second(cohort: Cohort, clock: Clock) -> None:
    for count in (1, 8) * ENOUGH:
        cohort.table.forecast.times.observe(count, count)


@pytest.mark.usefixtures("a_block_takes_a_second")
def test_a_short_prefix_of_a_long_flight_does_not_wait_for_it(
    cohort: Cohort, clock: Clock, reference: Arm
) -> None:
    """Hazards B2, B3: a follower that needs two blocks of a flight of twelve would wait twelve seconds for
    what it can have in four, and receive threads are idle. It loads them alone; a second one like it waits
    for that load, not for the long one; one that needs all twelve waits for both. Two finish while the long
    Get is still held, and no token is wrong."""
    trunk = blocks(*range(1, 13), salt=next(salts))
    store_prefixes(cohort.engine, trunk)
    long, short = hang(when=lambda keys: len(keys) == 12), hang(when=lambda keys: len(keys) == 2)
    with scripted(cohort.engine, long, short):
        cohort.arrive(long=[*trunk, 7])
        cohort.arrive(alone=[*trunk[: 2 * BLOCK], 8], beside=[*trunk[: 2 * BLOCK], 9])
        assert list(cohort.flight("alone").followers) == [cohort.id("beside")]
        assert cohort.blocks("alone") & cohort.blocks("long") == set()
        cohort.arrive(whole=[*trunk, 10])
        assert [f.fan_in for f in (cohort.flight("long"), cohort.flight("alone"))] == [2, 3]
        short.release.set()
        cohort.finish("alone", "beside")
        assert not cohort.finished["whole"]
        long.release.set()
        cohort.finish()
    counts = cohort.engine.recorder.take()
    assert (counts.gets, counts.keys, counts.gpu_blocks) == (2, 14, 14)
    cohort.expect_equal(reference)


@pytest.mark.usefixtures("a_block_takes_a_second")
def test_whoever_has_as_much_of_its_own_to_load_waits(cohort: Cohort, clock: Clock, reference: Arm) -> None:
    """The same two shared blocks, but ten of its own in the store: they are loaded while the long flight is
    in the air, so waiting for the shared two costs nothing. One lookup tells it so."""
    salt = next(salts)
    trunk, branch = blocks(*range(1, 13), salt=salt), blocks(1, 2, *range(51, 61), salt=salt)
    store_prefixes(cohort.engine, trunk, branch)
    get = hang(2)
    with scripted(cohort.engine, get):
        cohort.arrive(trunk=[*trunk, 7], branch=[*branch, 8])
        assert cohort.flight("trunk").fan_in == 2
        get.release.set()
        cohort.finish()
    counts = cohort.engine.recorder.take()
    assert (counts.lookups, counts.gets, counts.keys, counts.gpu_blocks) == (2, 2, 22, 22)
    cohort.expect_equal(reference)


def test_nobody_joins_a_load_that_hung_before_anybody_followed_it(
    cohort: Cohort, clock: Clock, reference: Arm
) -> None:
    """A lone load hangs. Who comes after its budget (10.4 s for four blocks of 32 tokens) does not wait for
    it first: it leads a load of its own, and finishes, while the hung one is still in the air."""
    trunk = blocks(1, 2, 3, 4, salt=next(salts))
    store_prefixes(cohort.engine, trunk)
    hung = hang()
    with scripted(cohort.engine, hung):
        cohort.arrive(hung=[*trunk, 7])
        flight = cohort.flight("hung")
        clock.advance(10.45)
        cohort.arrive(late=[*trunk, 8])
        assert flight.state is State.OVERDUE
        cohort.finish("late")
        assert not cohort.finished["hung"]
        hung.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 2
    cohort.expect_equal(reference)
