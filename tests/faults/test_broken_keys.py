"""A key that is listed in the store and cannot be read: bounded Gets, and everybody finishes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import fail_keys, scripted
from tests.faults.stock import LIVELOCK_STEPS

if TYPE_CHECKING:
    from singleflight.arms import Arm

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
    one computes the prefix, which is then a local hit: one Get for five requests. Under "fail" each meets
    vLLM's policy, as with stock, by one Get and no more: there is no memory of keys across requests."""
    names = [f"r{i}" for i in range(5)]
    with scripted(cohort.engine, fail_keys(0, times=sys.maxsize)):
        for name, prompt in tailed(trunk, *names).items():
            cohort.add(**{name: prompt})
            cohort.finish(name)
    assert cohort.engine.recorder.take().gets == (1 if policy == "recompute" else 5)
    cohort.expect_equal(reference, *([] if policy == "recompute" else names))
