"""KV events: whoever follows the stream can build the tree of cached blocks from it.

The shared engine, with the block pool's events switched on for the test. Every `BlockStored` names a parent
that is known, nothing is stored twice, and nothing is removed that was not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.core.stats import Reason
from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import fail_keys, hang, scripted
from tests.support import BLOCK, Clock, blocks, store_prefixes

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


class Stream:
    """What a listener knows."""

    def __init__(self) -> None:
        self.known: set[Any] = set()
        self.stored: list[Any] = []

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            kind = type(event).__name__
            if kind == "BlockStored":
                parent = event.parent_block_hash
                assert parent is None or parent in self.known, "a parent that nobody was told of"
                assert not self.known & set(event.block_hashes), "stored twice"
                assert len(set(event.block_hashes)) == len(event.block_hashes)
                self.known.update(event.block_hashes)
                self.stored += event.block_hashes
            elif kind == "BlockRemoved":
                assert self.known >= set(event.block_hashes), "removed, and never stored"
                self.known.difference_update(event.block_hashes)
            else:
                self.known.clear()

    def shutdown(self) -> None: ...


@pytest.fixture
def stream(engine: Engine) -> Iterator[Stream]:
    """Everything vLLM publishes while the test runs; the cache is empty before and after."""
    pool, scheduler = engine.scheduler.kv_cache_manager.block_pool, engine.scheduler
    listener, before = Stream(), scheduler.kv_event_publisher
    pool.enable_kv_cache_events = True
    scheduler.kv_event_publisher = listener
    yield listener
    engine.cold()
    if events := pool.take_events():  # of the reset itself
        listener.publish(type("Batch", (), {"events": events}))
    assert not listener.known
    pool.enable_kv_cache_events = False
    scheduler.kv_event_publisher = before


@pytest.fixture
def trunk(engine: Engine, salt: int) -> list[int]:
    """Twelve blocks that only the store has: A loads 1-4, B adopts them and loads 5-8, C loads 9-12."""
    twelve = blocks(*range(1, 13), salt=salt)
    store_prefixes(engine, twelve)
    return twelve


def chain(trunk: list[int]) -> dict[str, list[int]]:
    ends = {"a": 4, "b": 8, "c": 12}
    return {name: [*trunk[: end * BLOCK], *(ord(name) for _ in range(4))] for name, end in ends.items()}


def complete(cohort: Cohort, *names: str) -> Callable[[], bool]:
    """Their loads have been reported, and wait for what they stand on."""
    early = cohort.engine.connector.layer._complete_early
    return lambda: early.keys() == {cohort.id(name) for name in names}


def test_a_suffix_that_is_complete_first_is_told_of_after_the_flight_it_stands_on(
    cohort: Cohort, reference: Arm, trunk: list[int], stream: Stream
) -> None:
    first = hang()
    with scripted(cohort.engine, first):
        cohort.arrive(a=chain(trunk)["a"], b=chain(trunk)["b"])
        cohort.until(complete(cohort, "b"))
        cohort.step(5)
        assert not stream.stored
        first.release.set()
        cohort.finish()
    assert len(stream.stored) == 8
    cohort.expect_equal(reference)


def test_a_chain_of_flights_that_end_in_reverse_order(
    cohort: Cohort, reference: Arm, trunk: list[int], stream: Stream
) -> None:
    """A newcomer for all twelve blocks, while nothing is published, loads nothing."""
    first, second = hang(), hang()
    with scripted(cohort.engine, first, second):
        cohort.arrive(**chain(trunk))
        cohort.until(complete(cohort, "c"))
        second.release.set()
        cohort.until(complete(cohort, "b", "c"))
        cohort.arrive(late=[*trunk, *(9 for _ in range(4))])
        assert not stream.stored
        first.release.set()
        cohort.finish()
    assert len(stream.stored) == 12
    counts = cohort.engine.recorder.take()
    assert (counts.gets, counts.keys) == (3, 12)
    cohort.expect_equal(reference)


@pytest.mark.parametrize("aborted_after", [True, False], ids=["complete", "in the air"])
def test_whoever_leads_in_the_middle_is_aborted_and_others_need_its_blocks(
    cohort: Cohort, reference: Arm, trunk: list[int], stream: Stream, aborted_after: bool
) -> None:
    """B's blocks stay where they are until A's have landed, since C has adopted them; then they are
    published, C goes on, and all are free in the end."""
    first, second = hang(), hang()
    with scripted(cohort.engine, first, second):
        cohort.arrive(**chain(trunk))
        if aborted_after:
            second.release.set()
            cohort.until(complete(cohort, "b", "c"))
        cohort.abort("b")
        cohort.step(3)
        second.release.set()
        cohort.until(lambda: len(cohort.engine.connector.layer._complete_early) == 2)
        cohort.step(3)
        assert not stream.stored
        first.release.set()
        cohort.finish()
    assert len(stream.stored) == 12
    assert cohort.engine.recorder.take().keys == 12
    cohort.expect_equal(reference)


def test_whoever_leads_in_the_middle_is_aborted_and_nobody_needs_its_blocks(
    cohort: Cohort, reference: Arm, trunk: list[int], stream: Stream
) -> None:
    """Nobody waits for A's load on its behalf: its four blocks are free at once, as with stock."""
    first = hang()
    prompts = chain(trunk)
    with scripted(cohort.engine, first):
        cohort.arrive(a=prompts["a"])
        free = cohort.engine.free_blocks()
        cohort.arrive(b=prompts["b"])
        cohort.until(complete(cohort, "b"))
        cohort.abort("b")
        cohort.until(lambda: cohort.id("b") is None)
        assert cohort.engine.free_blocks() == free
        assert len(cohort.table) == 4
        first.release.set()
        cohort.finish()
    assert len(stream.stored) == 4
    cohort.expect_equal(reference)


def test_the_last_one_who_needs_an_aborted_leaders_blocks_is_aborted_too(
    cohort: Cohort, reference: Arm, trunk: list[int], stream: Stream
) -> None:
    first = hang()
    prompts = chain(trunk)
    with scripted(cohort.engine, first):
        cohort.arrive(a=prompts["a"])
        free = cohort.engine.free_blocks()
        cohort.arrive(b=prompts["b"], same=prompts["b"])
        cohort.until(complete(cohort, "b"))
        cohort.abort("b")
        cohort.step(3)
        assert cohort.engine.free_blocks() == free - 4
        cohort.abort("same")
        cohort.until(lambda: cohort.id("b") is None and cohort.id("same") is None)
        assert cohort.engine.free_blocks() == free
        first.release.set()
        cohort.finish()
    cohort.expect_equal(reference)


@pytest.mark.parametrize("there", [0, 2])
def test_the_flight_that_others_stand_on_fails(
    cohort: Cohort, reference: Arm, trunk: list[int], stream: Stream, policy: str, there: int
) -> None:
    """Of A's four blocks none or two are there. B and C fall back, and what they have loaded behind the gap
    is nobody's: it is computed, or loaded once more."""
    first = hang(then=fail_keys(*range(there, 4)))
    with scripted(cohort.engine, first):
        cohort.arrive(**chain(trunk))
        cohort.until(complete(cohort, "b", "c"))
        first.release.set()
        cohort.finish()
    assert cohort.fell_back() == {Reason.LEADER_FAILED: 2}
    cohort.expect_equal(reference, *(["a"] if policy == "fail" else []))


def test_whoever_waits_behind_a_hung_flight_falls_back_at_its_deadline(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int], stream: Stream
) -> None:
    """B's claim goes with it, and B computes in other blocks while A hangs. A is aborted, and its load ends
    well at last: those blocks are known already, and are not told of again."""
    prompts = chain(trunk)
    first = hang()
    with scripted(cohort.engine, first):
        cohort.arrive(a=prompts["a"], b=prompts["b"])
        cohort.until(complete(cohort, "b"))
        clock.advance(1000)
        cohort.finish("b")
        assert cohort.fell_back() == {Reason.DEADLINE: 1}
        cohort.abort("a")
        first.release.set()
        cohort.engine.settle()
    assert len(stream.stored) == 8
    cohort.expect_equal(reference)


def test_a_reset_while_a_complete_load_waits_for_the_one_it_stands_on(
    cohort: Cohort, reference: Arm, trunk: list[int], stream: Stream
) -> None:
    prompts = tailed(trunk, "leader")
    first = hang()
    with scripted(cohort.engine, first):
        cohort.arrive(a=chain(trunk)["a"])
        cohort.arrive(**prompts)
        cohort.until(complete(cohort, "leader"))
        assert cohort.engine.scheduler.reset_prefix_cache(reset_connector=True) is False
        cohort.finish("leader")
        assert cohort.fell_back() == {Reason.RESET: 1}
        cohort.abort("a")
        first.release.set()
    cohort.expect_equal(reference)
