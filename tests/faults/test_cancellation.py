"""Requests are aborted at every moment of a load: nobody else notices, and no block is lost.

One test for each moment. The baseline of free blocks, the empty table and the idle receive threads are
checked after each of them by the `engine` fixture.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.core.flight import State
from singleflight.core.stats import Reason
from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import HANG_S, fail_keys, hang, scribble, scripted
from tests.support import Clock, blocks, store_prefixes

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("followers", [0, 3])
def test_blocks_of_an_aborted_leader_are_not_given_away_while_the_load_writes(
    cohort: Cohort, reference: Arm, salt: int, trunk: list[int], followers: int
) -> None:
    """vllm#32255, hazard D1. The leader is aborted in mid-load; a stranger comes that needs every free
    block there is and runs; only then does the load write, rubbish even, and fail. Had the leader's blocks
    been freed at the abort, the stranger would have been given them, and would show it in its tokens."""
    prompts = tailed(trunk, "leader", *(f"f{i}" for i in range(followers)))
    get = hang(then=scribble())
    with scripted(cohort.engine, get):
        cohort.arrive(**prompts)
        destination = {block.block_id for block in cohort.flight("leader").destination}
        cohort.abort("leader")
        with cohort.free(7):
            cohort.add(stranger=[*blocks(*range(20, 26), salt=salt), 9])
            cohort.until(lambda: cohort.running("stranger"))
            assert len(cohort.blocks("stranger")) == 7
            assert cohort.engine.free_blocks() == 0
            assert not cohort.blocks("stranger") & destination
            pool = cohort.engine.scheduler.kv_cache_manager.block_pool
            assert all(pool.blocks[i].ref_cnt == 1 + followers for i in destination)
            get.release.set()
            assert get.left.wait(HANG_S)
            cohort.finish("stranger")
        cohort.finish()
    expected = {Reason.LEADER_FAILED: followers} if followers else {}
    assert cohort.fell_back() == expected
    cohort.expect_equal(reference)


def test_an_aborted_leaders_load_lands_and_late_comers_may_still_join_it(
    cohort: Cohort, reference: Arm, trunk: list[int]
) -> None:
    """Hazards D1, H1 (trufflehog#4314, cockroach#91038: the first caller's context kills everybody). The
    leader's client disconnects with one follower attached; the flight is an orphan, a late comer joins it,
    it lands and is published; whoever comes then has a local hit. One Get for all of them."""
    prompts = tailed(trunk, "leader", "early", "late", "after")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts["leader"], early=prompts["early"])
        cohort.abort("leader")
        cohort.step(2)
        assert cohort.flight("leader").state is State.ORPHANED
        cohort.arrive(late=prompts["late"])
        get.release.set()
        cohort.finish()
        cohort.add(after=prompts["after"])
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    assert cohort.fell_back() == {}
    cohort.expect_equal(reference)


@pytest.mark.parametrize("order", [("leader", "f0", "f1"), ("f1", "f0", "leader"), ("f0", "leader", "f1")])
def test_a_load_that_nobody_waits_for_any_more_is_still_of_use(
    cohort: Cohort, reference: Arm, trunk: list[int], order: tuple[str, ...]
) -> None:
    """Hazards D1, H1: every client disconnects, in some order. The load cannot be called back (Mooncake has
    no call for it); it lands, is published, its blocks are freed, and the next request loads nothing."""
    prompts = tailed(trunk, "leader", "f0", "f1", "next")
    after = prompts.pop("next")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(**prompts)
        for name in order:
            cohort.abort(name)
            cohort.step()
        get.release.set()
        cohort.engine.settle()
        cohort.add(next=after)
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)


def test_three_hundred_cancelled_loads_leak_nothing(cohort: Cohort, trunk: list[int]) -> None:
    """vllm-ascend#16662, hazard D2: there, the completion of an aborted request was filtered out and every
    client's cancel leaked the blocks. A load begins, its leader and one follower are aborted, in either
    order, and it completes, three hundred times; the pool is whole after each."""
    engine = cohort.engine
    free = engine.free_blocks()
    for i in range(300):
        engine.gate.open.clear()
        names = [f"l{i}", f"f{i}"]
        for name, prompt in tailed(trunk, *names).items():
            engine.add(name, prompt)
        engine.step()
        assert len(engine.connector.layer.table) == 4
        engine.llm.abort_request(names[:: 1 if i % 2 else -1])
        engine.gate.open.set()
        engine.cold()
        assert engine.free_blocks() == free
    assert engine.recorder.take().gets == 300


def test_blocks_of_an_aborted_leader_stay_reserved_for_as_long_as_the_load_may_write(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int]
) -> None:
    """vllm#46283, hazard D3: the completion does not come. The blocks are not reclaimed after a grace, as
    proposed there: a receive thread that hangs may still write. So they stay reserved, four blocks and not
    four for each request; the engine serves on; the completion, a week late, frees them once."""
    prompts = tailed(trunk, "leader", "follower", "again")
    again = prompts.pop("again")
    free = cohort.engine.free_blocks()
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(**prompts)
        cohort.abort("leader", "follower")
        cohort.step(3)
        assert cohort.engine.free_blocks() == free - 4
        clock.advance(7 * 86_400)
        cohort.step(3)
        assert cohort.engine.free_blocks() == free - 4
        get.release.set()
        cohort.engine.settle()
        assert cohort.engine.free_blocks() == free
        cohort.add(again=again)
        cohort.finish()
    cohort.expect_equal(reference)


@pytest.mark.parametrize("order", ["own load first", "flight first", "same step"])
def test_a_follower_aborted_with_a_load_of_its_own_is_freed_once_after_that_load(
    cohort: Cohort, reference: Arm, salt: int, order: str
) -> None:
    """vllm#46240, hazard D4: two transfers concern one aborted request, and the second completion met a
    request that was gone: the engine core died. Here a follower adopts 1-4, loads 5-6 itself, and is
    aborted while both are in the air. Its blocks are held exactly until its own load has ended.

    What it has loaded is published too, if what it stands on is there by then. If not, nobody could be told
    of it yet, and it is not held for that: whoever needs it later loads it again."""
    long = blocks(*range(1, 7), salt=salt)
    store_prefixes(cohort.engine, long)
    trunk_get, own_get = hang(when=lambda keys: len(keys) == 4), hang(when=lambda keys: len(keys) == 2)
    with scripted(cohort.engine, trunk_get, own_get):
        cohort.arrive(leader=[*long[: 4 * 32], 7], follower=[*long, 8])
        cohort.abort("follower")
        cohort.step(2)
        assert len(cohort.blocks("follower")) == 6
        if order == "own load first":
            own_get.release.set()
            cohort.until(lambda: cohort.id("follower") is None)
            trunk_get.release.set()
        elif order == "flight first":
            trunk_get.release.set()
            cohort.finish("leader")
            assert len(cohort.blocks("follower")) == 6
            own_get.release.set()
        else:
            trunk_get.release.set()
            own_get.release.set()
            cohort.engine.worker_connector.connector_worker.recv_request_queue.join()
        cohort.finish()
        cohort.until(lambda: cohort.id("follower") is None)
        cohort.add(next=[*long, 9])
        cohort.finish()
    counts = cohort.engine.recorder.take()
    again = 2 if order == "own load first" else 0
    assert counts.keys == 6 + again, "the aborted follower's own load was published too"
    assert counts.gets == (3 if again else 2)
    cohort.expect_equal(reference)


def test_a_request_aborted_while_its_own_blocks_are_being_saved_is_freed_after_the_save(
    cohort: Cohort, reference: Arm, salt: int, trunk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#46240, vllm#56089, hazard D4, the other pair of transfers: a leader loads the shared prefix, has
    computed two blocks of its own, and is aborted while these are being saved. Followers share the prefix;
    a newcomer finds the saved blocks right."""
    sender = cohort.engine.worker_connector.connector_worker.kv_send_thread
    saving, saved = threading.Event(), threading.Event()

    class Held:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def batch_put_from_multi_buffers(self, *arguments: Any) -> Any:
            saving.set()
            assert saved.wait(HANG_S)
            return self._store.batch_put_from_multi_buffers(*arguments)

    monkeypatch.setattr(sender, "store", Held(sender.store))
    long = [*trunk, *blocks(5, 6, salt=salt)]
    free = cohort.engine.free_blocks()
    cohort.engine.gate.open.clear()
    cohort.arrive(leader=[*long, 7], follower=[*trunk, 8])
    cohort.engine.gate.open.set()
    cohort.until(saving.is_set)
    cohort.abort("leader")
    cohort.finish()
    cohort.step(2)
    assert cohort.engine.free_blocks() < free
    saved.set()
    cohort.engine.settle()
    cohort.engine.cold()
    cohort.add(next=[*long, 9])
    cohort.finish()
    counts = cohort.engine.recorder.take()
    assert (counts.gets, counts.keys) == (2, 4 + 6)
    cohort.expect_equal(reference)


def test_a_follower_that_has_been_refused_blocks_leaves_nothing_when_it_is_aborted(
    cohort: Cohort, reference: Arm, salt: int
) -> None:
    """vllm#44100, vllm#18485, hazard D5: the window between the lookup and the allocation. A follower would
    adopt 1-4 and load 5-8, for which there is no room; it is asked and refused in five passes, and then its
    client leaves. It was never a member, so the leader's blocks have one reference throughout."""
    long = blocks(*range(1, 9), salt=salt)
    store_prefixes(cohort.engine, long)
    attached = cohort.table.stats.attached
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=[*long[: 4 * 32], 7])
        with cohort.free(2):
            cohort.add(follower=[*long, 8])
            lookups = cohort.engine.recorder.counts.lookups
            cohort.step(5)
            assert cohort.engine.recorder.counts.lookups > lookups, "it was looked at, and refused"
            assert cohort.table.stats.attached == attached
            assert {block.ref_cnt for block in cohort.flight("leader").destination} == {1}
            cohort.abort("follower")
            cohort.step()
            assert not cohort.engine.connector.layer._plans
            assert not cohort.engine.connector.connector_scheduler.load_specs
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().keys == 4
    cohort.expect_equal(reference)


def test_a_leader_that_has_been_refused_blocks_leaves_nothing_when_it_is_aborted(
    cohort: Cohort, reference: Arm, trunk: list[int]
) -> None:
    """Hazard D5: it would have led, but there was no room for the destination. Nobody can have attached to
    it: a flight is registered after the allocation. The next request leads as if it had never been."""
    prompts = tailed(trunk, "refused", "next")
    with cohort.free(2):
        cohort.add(refused=prompts["refused"])
        cohort.step(5)
        assert len(cohort.table) == 0
        cohort.abort("refused")
        cohort.step()
        assert not cohort.engine.connector.connector_scheduler.load_specs
    assert cohort.engine.recorder.counts.gets == 0
    cohort.add(next=prompts["next"])
    cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)


def test_a_request_that_vllm_does_not_admit_never_reaches_the_table(cohort: Cohort, trunk: list[int]) -> None:
    """Hazard D5: a prompt longer than the model's context is refused at the door, in mid-flight."""
    from vllm.exceptions import VLLMValidationError

    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, "leader"))
        with pytest.raises(VLLMValidationError, match="maximum"):
            cohort.engine.add("long", [*trunk, *([7] * 8192)])
        cohort.step(2)
        assert [str(f.leader) for f in cohort.table._flights.values()] == [cohort.id("leader")]
        assert not cohort.table._members
        get.release.set()
        cohort.finish()


def test_a_cancelled_follower_does_not_take_the_flight_with_it(
    cohort: Cohort, reference: Arm, trunk: list[int]
) -> None:
    """janos/singleflight#4, hazard H2: there, a waiter that gave up removed the key, and a second execution
    began beside the first. One of three followers is aborted; it waits without a load of its own, so its
    blocks are let go through the worker within two steps; a newcomer joins; one Get."""
    prompts = tailed(trunk, "leader", "f0", "f1", "f2", "newcomer")
    newcomer = prompts.pop("newcomer")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(**prompts)
        destination = cohort.flight("leader").destination
        assert {block.ref_cnt for block in destination} == {4}
        cohort.abort("f1")
        cohort.step(2)
        assert cohort.id("f1") is None
        assert {block.ref_cnt for block in destination} == {3}
        cohort.arrive(newcomer=newcomer)
        assert {block.ref_cnt for block in destination} == {4}
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)


def test_children_of_one_prompt_survive_the_first_child(
    cohort: Cohort, reference: Arm, trunk: list[int]
) -> None:
    """vllm#39647, vllm#38900, hazard A6: eight children of one prompt arrive in one step; child 0 leads and
    is aborted. The other seven finish on its load, each with a last block of its own to write to."""
    children = {f"child{i}": [*trunk, 7, 7] for i in range(8)}
    get = hang()
    with scripted(cohort.engine, get):
        cohort.add(**children)
        cohort.until(get.reached.is_set)
        assert len(cohort.flight("child0").followers) == 7
        cohort.abort("child0")
        get.release.set()
        cohort.until(lambda: all(cohort.running(f"child{i}") for i in range(1, 8)))
        tails = [cohort.blocks(f"child{i}") for i in range(1, 8) if not cohort.finished[f"child{i}"]]
        assert len(tails) == 7
        assert len(set.union(*tails)) == 4 + 7
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)


def test_fifteen_of_sixteen_are_aborted_one_after_the_other(
    cohort: Cohort, reference: Arm, trunk: list[int]
) -> None:
    """moka#59, async_singleflight#3, hazard H6: whoever is first in line is aborted, fifteen times. There is
    no election, since the flight outlives its leader: one Get, and the last one finishes on it."""
    names = [f"m{i}" for i in range(16)]
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, *names))
        for name in names[:-1]:
            cohort.abort(name)
            cohort.step()
            assert len(cohort.table._flights) == 1
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)


def test_whoever_leads_is_aborted_and_its_load_fails_again_and_again(
    cohort: Cohort, reference: Arm, trunk: list[int], policy: str
) -> None:
    """Hazard H6, with a failing load each time, so that there is somebody to elect: the first leader is
    aborted and its load fails; one of fifteen leads again, the others attach to it; it is aborted and its
    load fails too. Now everybody has used the one hand-over there is and computes the prefix: two Gets, one
    leader at any time, thirteen or more survivors."""
    gets = [hang(then=fail_keys()) for _ in range(16)]
    with scripted(cohort.engine, *gets):
        cohort.arrive(**tailed(trunk, *(f"m{i}" for i in range(16))))
        for get in gets:
            cohort.until(lambda get=get: get.reached.is_set() or len(cohort.finished))
            if not get.reached.is_set():
                break
            (flight,) = cohort.table._flights.values()
            cohort.abort(str(flight.leader).rpartition("-")[0])
            get.release.set()
            cohort.until(lambda flight=flight: flight.state is State.FAILED)
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 2
    assert len(cohort.tokens) == 14
    cohort.expect_equal(reference)
