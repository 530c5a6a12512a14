"""Park mode under faults: whoever waits holds nothing, is let go in time, and loads at most once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from connector_patch.config import Config
from singleflight.core.stats import Reason
from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import fail_keys, hang, scripted
from tests.support import Clock, blocks, expect_equal, finish, quiescent, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine

BUDGET_S = 10.25
"""For a flight of four blocks."""
TICK_S = 1 / 1024


@pytest.fixture
def engine(ours: Engine) -> Iterator[Engine]:
    """The shared engine with its connector's scheduler side in park mode, quiescent before and after."""
    from connector_patch.mooncake import MooncakeStore
    from connector_patch.park import ParkScheduler

    attach = ours.connector.layer
    ours.connector.layer = ParkScheduler(MooncakeStore(ours.connector.connector_scheduler), Config())
    try:
        with quiescent(ours) as running:
            yield running
    finally:
        ours.connector.layer = attach


@pytest.fixture(autouse=True)
def budget(configured: Callable[..., None]) -> None:
    configured(deadline_base_s=10.0, deadline_per_block_s=0.0625)


def park(cohort: Cohort, **prompts: list[int]) -> None:
    """Add requests, and step until each waits for another's load."""
    cohort.add(**prompts)
    cohort.until(lambda: all(cohort.table.waiting(cohort.id(name)) for name in prompts))


def test_a_parked_request_holds_nothing_and_asks_the_store_nothing(
    cohort: Cohort, reference: Arm, trunk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazards B4, F8. Three wait through twenty steps: no block, no lookup, and vLLM asks the layer once a
    step for each. When the load lands all go on with local hits, and one lookup and one Get were made."""
    prompts = tailed(trunk, "leader", "a", "b", "c")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts.pop("leader"))
        park(cohort, **prompts)
        free = cohort.engine.free_blocks()
        asked: list[Any] = []
        match = cohort.engine.connector.layer.match
        monkeypatch.setattr(
            cohort.engine.connector.layer, "match", lambda *args: asked.append(match(*args)) or asked[-1]
        )
        cohort.step(20)
        assert asked == [(None, False)] * 60
        assert cohort.engine.free_blocks() == free
        assert all(not cohort.blocks(name) for name in prompts)
        get.release.set()
        cohort.finish()
    counts = cohort.engine.recorder.take()
    assert (counts.lookups, counts.load_specs, counts.gets, counts.gpu_blocks) == (1, 1, 1, 4)
    cohort.expect_equal(reference)


def test_a_suffix_of_its_own_is_loaded_after_the_wait(cohort: Cohort, reference: Arm, salt: int) -> None:
    """Two shared blocks and two of its own in the store: four Gets' worth of keys, none twice."""
    trunk, branch = blocks(1, 2, 3, 4, salt=salt), blocks(1, 2, 50, 60, salt=salt)
    store_prefixes(cohort.engine, trunk, branch)
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=[*trunk, 7])
        park(cohort, branch=[*branch, 8])
        get.release.set()
        cohort.finish()
    counts = cohort.engine.recorder.take()
    assert (counts.gets, counts.keys) == (2, 6)
    cohort.expect_equal(reference)


@pytest.mark.parametrize("idle", [True, False])
def test_whoever_would_load_its_own_after_the_wait_does_not_wait_where_threads_are_idle(
    cohort: Cohort, clock: Clock, reference: Arm, salt: int, idle: bool
) -> None:
    """vllm-facts: 0.3 s a Get and 16 threads, 1k shared and 3k own: park 0.78 s, stock 0.43 s. A Get takes a
    second whatever its size, so the wait and the own Get would take two. Without an idle thread it waits."""
    for _ in range(8):
        cohort.table.forecast.times.observe(4, 1.0)
    cohort.table.forecast.lanes = 4 if idle else 1
    trunk, branch = blocks(1, 2, 3, 4, salt=salt), blocks(1, 2, 50, 60, salt=salt)
    store_prefixes(cohort.engine, trunk, branch)
    get = hang(2)
    with scripted(cohort.engine, get):
        cohort.arrive(leader=[*trunk, 7])
        if idle:
            cohort.arrive(branch=[*branch, 8])
        else:
            park(cohort, branch=[*branch, 8])
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().keys == (8 if idle else 6)
    cohort.expect_equal(reference)


def test_the_leader_fails(cohort: Cohort, reference: Arm, trunk: list[int], policy: str) -> None:
    """Hazards C3, E7. Four wait when the load fails. Under "fail" the leader ends with an error, the first of
    the four loads again and three wait for that: two Gets. Under "recompute" the leader computes the prefix
    and they hit what it has computed: one."""
    prompts = tailed(trunk, "leader", "a", "b", "c", "d")
    get = hang(then=fail_keys(2))
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts.pop("leader"))
        park(cohort, **prompts)
        get.release.set()
        cohort.finish()
    assert cohort.fell_back() == {Reason.LEADER_FAILED: 4}
    assert cohort.engine.recorder.take().gets == (2 if policy == "fail" else 1)
    cohort.expect_equal(reference, *(["leader"] if policy == "fail" else []))


def test_a_key_that_always_fails_ends_in_local_prefill(
    cohort: Cohort, reference: Arm, trunk: list[int], policy: str
) -> None:
    """Hazard E7: at most two Gets for the whole cohort, no livelock."""
    prompts = tailed(trunk, "leader", "a", "b", "c", "d")
    with scripted(cohort.engine, fail_keys(0, times=1000)):
        cohort.add(**prompts)
        cohort.finish()
    failed = [name for name in prompts if not cohort.tokens[name]]
    assert failed == (["leader", "a"] if policy == "fail" else [])
    assert cohort.engine.recorder.take().gets == (2 if policy == "fail" else 1)
    cohort.expect_equal(reference, *failed)


def test_the_leader_is_aborted(cohort: Cohort, reference: Arm, trunk: list[int]) -> None:
    """vLLM throws an aborted request's load away, so nobody waits for it any longer: the first of the
    others loads again while the dead Get still hangs, and the second waits for that."""
    prompts = tailed(trunk, "leader", "a", "b")
    dead, second = hang(), hang()
    with scripted(cohort.engine, dead, second):
        cohort.arrive(leader=prompts.pop("leader"))
        park(cohort, **prompts)
        cohort.abort("leader")
        cohort.until(second.reached.is_set)
        assert list(cohort.flight("a").followers) == [cohort.id("b")]
        second.release.set()
        cohort.finish()
        dead.release.set()
    assert cohort.engine.recorder.take().gets == 2
    cohort.expect_equal(reference)


def test_leaders_that_leave_one_after_the_other_do_not_break_up_the_cohort(
    cohort: Cohort, reference: Arm, trunk: list[int]
) -> None:
    """Hazard H6: three clients in a row disconnect while their load hangs. That says nothing against the
    store: the rest still share the fourth load, and nobody computes the prefix beside it."""
    prompts = tailed(trunk, "a", "b", "c", "d", "e", "f")
    gets = [hang() for _ in range(4)]
    with scripted(cohort.engine, *gets):
        cohort.arrive(a=prompts.pop("a"))
        park(cohort, **prompts)
        for leader, get in zip("abc", gets[1:], strict=True):
            cohort.abort(leader)
            cohort.until(get.reached.is_set)
        for get in gets:
            get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 4
    cohort.expect_equal(reference)


@pytest.mark.parametrize(("on_deadline", "gets"), [("recompute", 1), ("load", 2)])
def test_the_load_hangs(
    cohort: Cohort,
    clock: Clock,
    configured: Callable[..., None],
    reference: Arm,
    trunk: list[int],
    on_deadline: str,
    gets: int,
) -> None:
    """Hazards C1, C5. To the tick of its deadline a follower waits; at it, it goes on without the load, or
    with one of its own. A newcomer does not wait for the hung load either: it hits what is there by then."""
    configured(on_deadline)
    prompts = tailed(trunk, "leader", "parked", "newcomer")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts["leader"])
        park(cohort, parked=prompts["parked"])
        clock.advance(BUDGET_S - TICK_S)
        cohort.step(20)
        assert cohort.table.waiting(cohort.id("parked"))
        clock.advance(TICK_S)
        cohort.finish("parked")
        assert cohort.fell_back() == {Reason.DEADLINE: 1}
        cohort.add(newcomer=prompts["newcomer"])
        cohort.finish("newcomer")
        assert not cohort.finished["leader"]
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == gets
    cohort.expect_equal(reference)


def test_a_parked_request_is_aborted(cohort: Cohort, reference: Arm, trunk: list[int]) -> None:
    """Hazard H2: it is gone in the same step, and takes nobody along."""
    prompts = tailed(trunk, "leader", "a", "b")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts.pop("leader"))
        park(cohort, **prompts)
        cohort.abort("a")
        cohort.step()
        assert cohort.id("a") is None
        assert list(cohort.flight("leader").followers) == [cohort.id("b")]
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)


def test_the_caches_are_reset(cohort: Cohort, reference: Arm, trunk: list[int]) -> None:
    """Hazards G1, G2: nobody waits for a load from before the reset. The store is empty then, so the
    followers compute, without waiting for the load that still hangs."""
    prompts = tailed(trunk, "leader", "a", "b")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts.pop("leader"))
        park(cohort, **prompts)
        assert cohort.engine.scheduler.reset_prefix_cache(reset_connector=True) is False
        assert cohort.fell_back() == {Reason.RESET: 2}
        cohort.finish("a", "b")
        assert not cohort.finished["leader"]
        cohort.abort("leader")
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)


def test_asynchronous_lookups(
    engine: Engine, reference: Arm, salt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lookup_async: all ask in one pass, before any leads; in the next, one leads and the others wait."""
    monkeypatch.setattr(engine.connector.connector_scheduler, "lookup_async", True)
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, 7 + i] for i in range(6)}
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, {"r0": prompts["r0"]})
    for name in list(prompts)[1:]:
        engine.add(name, prompts[name])
    while len(engine.connector.layer.table._members) < 5:
        next(steps)
    tokens = finish(engine, burst, steps)
    assert not engine.connector.connector_scheduler.client.futures
    assert engine.recorder.take().gets == 1
    expect_equal(reference, prompts, tokens)


def test_a_pause_that_outlasts_the_deadline_lets_nobody_go(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int]
) -> None:
    """A weight update pauses the engine (`pause_generation`, mode "keep") for longer than any deadline, and
    the load lands meanwhile. In the first step after it the worker reports that, and it counts: one Get, and
    no burst of fallen-back requests on the dashboard."""
    prompts = tailed(trunk, "leader", "a", "b", "c")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts.pop("leader"))
        park(cohort, **prompts)
        cohort.engine.core.pause_scheduler(mode="keep", clear_cache=False)
        get.release.set()
        cohort.engine.worker_connector.connector_worker.recv_request_queue.join()
        clock.advance(1000)
        cohort.engine.core.resume_scheduler()
        cohort.finish()
    assert cohort.fell_back() == {}
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)
