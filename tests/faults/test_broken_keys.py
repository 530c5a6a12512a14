"""A key that is listed in the store and cannot be read: bounded Gets, and everybody finishes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.core.broken import BrokenKeys
from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import fail_keys, scripted
from tests.faults.stock import LIVELOCK_STEPS
from tests.support import Clock, blocks, store_prefixes

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine

LEASE_EXPIRED = -707


def test_the_stock_connector_does_get_after_get_and_finishes_nothing(stock: dict[str, Any]) -> None:
    """The control of this file, and the reason for it (hazard E7; 608 Gets in 4 s when first seen): under
    "recompute" a stock request whose first block fails starts again, looks up, finds the key listed and
    loads it again. Eight requests, one Get for each in every step, and not one of them ever finishes."""
    assert stock["livelock"]["finished"] == []
    assert stock["livelock"]["gets"] > 8 * LIVELOCK_STEPS * 0.9


def test_a_cohort_whose_first_block_always_fails_finishes_by_computing_it(
    cohort: Cohort, reference: Arm, trunk: list[int], policy: str
) -> None:
    """layercache#59, hazard E7: 16 requests behind one broken key; no stampede and no chain. "recompute":
    the leader computes, and the others find what it has computed: one Get. "fail": the leader ends in an
    error, one follower tries once more and does so too, and then nobody touches the key: two Gets."""
    names = [f"r{i}" for i in range(16)]
    cohort.engine.gate.open.clear()
    with scripted(cohort.engine, fail_keys(0, times=sys.maxsize)):
        cohort.arrive(**tailed(trunk, *names))
        cohort.engine.gate.open.set()
        cohort.finish()
    failed = [name for name in names if not cohort.tokens[name]]
    assert failed == ([] if policy == "recompute" else ["r0", "r1"])
    assert cohort.engine.recorder.take().gets == 1 + len(failed[1:])
    cohort.expect_equal(reference, *failed)


def test_an_expired_lease_fails_the_whole_load_and_starts_no_storm(
    cohort: Cohort, reference: Arm, trunk: list[int], policy: str
) -> None:
    """Mooncake#3076, Mooncake#3599, hazard E8: a lookup takes a lease, and a load that stands in line for
    longer gets -707 for every key. Followers do not look up, so they take no leases that starve eviction;
    the load fails as a whole; the one retry has a lookup, and so a lease, of its own. Where the leader
    recomputes, each follower has a local hit, and looks up what may come after it, as any request does."""
    cohort.engine.gate.open.clear()
    with scripted(cohort.engine, fail_keys(code=LEASE_EXPIRED)):
        cohort.arrive(**tailed(trunk, *(f"r{i}" for i in range(6))))
        assert cohort.engine.recorder.counts.lookups == 1
        cohort.engine.gate.open.set()
        cohort.finish()
    counts = cohort.engine.recorder.take()
    assert (counts.lookups, counts.gets) == ((1 + 5, 1) if policy == "recompute" else (2, 2))
    cohort.expect_equal(reference, *([] if policy == "recompute" else ["r0"]))


def test_requests_one_after_the_other_pay_for_a_broken_key_no_more_than_with_stock(
    cohort: Cohort, reference: Arm, trunk: list[int], policy: str
) -> None:
    """sglang#31315, hazard E5: every request repeated lookup, Get and time-out. Under "recompute" the first
    one computes the prefix, which is then a local hit. Under "fail" the first meets vLLM's policy, and the
    next knows that the block is broken and computes it; with stock each would end so, by its own Get.
    One Get for five requests."""
    names = [f"r{i}" for i in range(5)]
    with scripted(cohort.engine, fail_keys(0, times=sys.maxsize)):
        for name, prompt in tailed(trunk, *names).items():
            cohort.add(**{name: prompt})
            cohort.finish(name)
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference, *([] if policy == "recompute" else names[:1]))


@pytest.mark.parametrize("remembered", [True, False])
def test_a_key_that_cannot_be_read_costs_one_get_for_as_long_as_it_is_remembered(
    cohort: Cohort, clock: Clock, reference: Arm, salt: int, policy: str, remembered: bool
) -> None:
    """sglang#31315, hazard E5: the store lists the key and cannot read it, and the local cache has lost the
    block each time. Five requests, one after the other, cost one Get; without a memory of broken keys they
    cost five, as with stock. When the time is over, one more."""
    if not remembered:
        cohort.engine.connector.layer.health.broken = BrokenKeys(0.0)
    one = blocks(1, salt=salt)
    store_prefixes(cohort.engine, one)
    failed = []
    with scripted(cohort.engine, fail_keys(0, times=sys.maxsize)):
        for i, name in enumerate(f"r{i}" for i in range(6)):
            if i == 5:
                assert cohort.engine.recorder.take().gets == (1 if remembered else 5)
                clock.advance(30.0)
            cohort.add(**{name: [*one, 7 + i]})
            cohort.finish(name)
            cohort.engine.cold()
            if policy == "fail" and (not remembered or i in (0, 5)):
                failed.append(name)
    assert cohort.engine.recorder.take().gets == 1
    assert cohort.engine.connector.layer.table.stats.blocks_broken > 0
    cohort.expect_equal(reference, *failed)


@pytest.mark.parametrize("bad", range(4))
def test_of_a_prefix_with_a_broken_block_only_what_is_before_it_is_loaded(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int], bad: int
) -> None:
    """Eight requests for four blocks, of which one is known to be broken: one Get of those before it, shared,
    and the rest is computed."""
    layer, names = cohort.engine.connector.layer, [f"r{i}" for i in range(8)]
    cohort.add(**tailed(trunk, *names))
    broken = cohort.request("r0").block_hashes[bad]
    layer.health.unreadable(broken, clock())
    cohort.finish()
    counts = cohort.engine.recorder.take()
    assert (counts.gets, counts.keys) == ((1, bad) if bad else (0, 0))
    cohort.expect_equal(reference)
