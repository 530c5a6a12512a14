"""The followers' deadline, to the tick of an injected clock: what happens at it, and what comes after it.

The budget here is 10 s and 1/16 s for each block of the flight, numbers that floats can hold.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.core.flight import State
from singleflight.core.stats import Reason
from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import (
    HANG_S,
    Fault,
    fail_keys,
    hang,
    raise_,
    scribble,
    scripted,
    silent_after,
)
from tests.support import BLOCK, Clock, blocks, store_prefixes

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine

BUDGET_S = 10.25
"""For a flight of four blocks."""
TICK_S = 1 / 1024


@pytest.fixture(autouse=True)
def budget(configured: Callable[..., None]) -> None:
    configured(deadline_base_s=10.0, deadline_per_block_s=0.0625)


def visible(engine: Engine, request: Any, count: int) -> list[int]:
    """Which of the request's first blocks are prefix-cache hits."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    return [i for i in range(count) if pool.get_cached_block(request.block_hashes[i], [0])]


@pytest.mark.parametrize(("on_deadline", "gets"), [("recompute", 1), ("load", 2)])
def test_each_follower_of_a_hung_load_falls_back_at_its_own_deadline_exactly_once(
    cohort: Cohort,
    clock: Clock,
    configured: Callable[..., None],
    reference: Arm,
    trunk: list[int],
    monkeypatch: pytest.MonkeyPatch,
    on_deadline: str,
    gets: int,
) -> None:
    """vllm#49829, hazard C1: one request made 1.27 million lookups behind a load that did not end. Two
    followers attach three seconds apart to a load that hangs. Until the last tick before their deadlines
    nobody is asked again; at it, each is running one step later, in blocks other than the hung ones."""
    configured(on_deadline)
    prompts = tailed(trunk, "leader", "first", "second")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts["leader"], first=prompts["first"])
        clock.advance(3)
        cohort.arrive(second=prompts["second"])
        cohort.step()
        asked: list[str] = []
        stock = cohort.engine.connector.layer.match
        monkeypatch.setattr(
            cohort.engine.connector.layer,
            "match",
            lambda request, local: asked.append(request.request_id) or stock(request, local),
        )
        hung = {block.block_id for block in cohort.flight("leader").destination}
        clock.advance(BUDGET_S - 3 - TICK_S)
        cohort.step(50)
        assert cohort.fell_back() == {}
        assert asked == [], "waiting costs no lookups"
        clock.advance(TICK_S)
        cohort.step(2)
        assert cohort.fell_back() == {Reason.DEADLINE: 1}
        if on_deadline == "recompute":
            assert cohort.running("first")
        else:
            cohort.until(lambda: cohort.running("first"))
        assert not cohort.blocks("first") & hung
        cohort.finish("first")
        clock.advance(3 - TICK_S)
        cohort.step(5)
        assert not cohort.running("second")
        clock.advance(TICK_S)
        cohort.finish("second")
        assert len(asked) == 2
        assert not cohort.finished["leader"]
        get.release.set()
        cohort.finish()
    assert cohort.fell_back() == {Reason.DEADLINE: 2}
    # The second finds what the first has computed or loaded.
    assert cohort.engine.recorder.take().gets == gets
    cohort.expect_equal(reference)


@pytest.mark.parametrize("when", ["in the prefill", "in the decode", "afterwards"])
@pytest.mark.parametrize("write", ["lands", "scribbles and fails"])
def test_a_write_that_comes_after_the_deadline_touches_nobody(
    cohort: Cohort,
    clock: Clock,
    reference: Arm,
    trunk: list[int],
    monkeypatch: pytest.MonkeyPatch,
    write: str,
    when: str,
) -> None:
    """vllm#49545, vllm#57705, hazard D6: a soft time-out that recomputes into blocks which a late write
    still hits. The follower falls back into other blocks; the load completes between the scheduling and the
    forward pass of its prefill, before a decode step, or after its end: good bytes, or rubbish and an
    error. The hung blocks are let go of by the leader alone, at the completion."""
    get = hang(then=None if write == "lands" else scribble())
    ended = cohort.engine.worker_connector.connector_worker.recv_request_queue.join

    def let_it_write() -> None:
        get.release.set()
        assert get.left.wait(HANG_S)
        ended()

    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, "leader", "follower"))
        hung = {block.block_id for block in cohort.flight("leader").destination}
        clock.advance(BUDGET_S)
        cohort.step()
        assert cohort.fell_back() == {Reason.DEADLINE: 1}
        if when == "in the prefill":
            stock = cohort.engine.worker_connector.start_load_kv

            def start(*arguments: Any, **more: Any) -> None:
                let_it_write()
                stock(*arguments, **more)

            monkeypatch.setattr(cohort.engine.worker_connector, "start_load_kv", start)
        cohort.step()
        assert cohort.running("follower")
        assert not cohort.blocks("follower") & hung
        if when == "afterwards":
            cohort.finish("follower")
        let_it_write()
        cohort.finish()
    cohort.expect_equal(reference, *(["leader"] if write != "lands" else []))


def test_a_follower_without_room_for_other_blocks_keeps_waiting(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int]
) -> None:
    """Hazard D6: its deadline passes, and not one GPU block is free to compute the prefix into. It holds
    nothing, is never put into the hung blocks, and runs when there is room."""
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, "leader", "follower"))
        with cohort.free(0):
            clock.advance(BUDGET_S)
            cohort.step(6)
            assert cohort.fell_back() == {Reason.DEADLINE: 1}
            assert not cohort.running("follower")
            assert not cohort.blocks("follower")
            assert {block.ref_cnt for block in cohort.flight("leader").destination} == {1}
        cohort.finish("follower")
        assert not cohort.finished["leader"]
        get.release.set()
        cohort.finish()
    cohort.expect_equal(reference)


@pytest.mark.parametrize("aborted", [False, True], ids=["", "and is aborted"])
def test_a_late_follower_whose_own_load_still_writes_waits_for_that_load(
    cohort: Cohort, clock: Clock, reference: Arm, salt: int, aborted: bool
) -> None:
    """Hazards D4, D6: the follower adopts 1-4, which hang, and loads 5-6 itself, which is slow. When its
    deadline has passed it must keep 5-6 until its own load has ended: they are still being written to. It
    then starts again, or, if its client has left meanwhile, is freed once."""
    long = blocks(*range(1, 7), salt=salt)
    store_prefixes(cohort.engine, long)
    trunk_get, own_get = hang(when=lambda keys: len(keys) == 4), hang(when=lambda keys: len(keys) == 2)
    with scripted(cohort.engine, trunk_get, own_get):
        cohort.arrive(leader=[*long[: 4 * BLOCK], 7], follower=[*long, 8])
        clock.advance(BUDGET_S)
        cohort.step(5)
        assert cohort.fell_back() == {Reason.DEADLINE: 1}
        assert len(cohort.blocks("follower")) == 6
        if aborted:
            cohort.abort("follower")
            cohort.step(2)
            assert len(cohort.blocks("follower")) == 6
        own_get.release.set()
        if aborted:
            cohort.until(lambda: cohort.id("follower") is None)
        else:
            cohort.finish("follower")
        assert not cohort.finished["leader"]
        trunk_get.release.set()
        cohort.finish()
    cohort.expect_equal(reference)


def test_a_load_that_falls_silent_half_way_publishes_nothing(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int]
) -> None:
    """LMCache#5047, hazard C4: 58 of 184 keys arrived, then silence for 600 s. Two of four blocks arrive;
    none becomes a prefix-cache hit, the followers compute at their deadline, and the rest, which comes
    after all, is published when the whole is there."""
    get = silent_after(2)
    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, "leader", "f0", "f1"))
        cohort.until(get.reached.is_set)
        cohort.step(3)
        leader = cohort.request("leader")
        assert visible(cohort.engine, leader, 4) == []
        clock.advance(BUDGET_S)
        cohort.finish("f0", "f1")
        get.release.set()
        cohort.finish()
        assert visible(cohort.engine, leader, 4) == [0, 1, 2, 3]
    assert cohort.fell_back() == {Reason.DEADLINE: 2}
    cohort.expect_equal(reference)


@pytest.mark.parametrize("phase", ["the queue", "the Get", "the report"])
def test_the_deadline_covers_every_phase_of_a_load(
    cohort: Cohort,
    clock: Clock,
    reference: Arm,
    salt: int,
    trunk: list[int],
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    """vllm#56823, hazard C2: a deadline on the transfer, none on the phases around it. The leader's load
    hangs in the queue (other Gets have every receive thread), in the store, or between the store's answer
    and the report to the scheduler. The follower is running within its deadline and two steps."""
    others = {f"other{i}": [*blocks(60 + i, 70 + i, salt=salt), 7] for i in range(4)}
    store_prefixes(cohort.engine, *others.values())
    gets = [hang() for _ in range(4)] if phase == "the queue" else [hang()] if phase == "the Get" else []
    thread = type(cohort.engine.worker_connector.connector_worker.kv_recv_threads[0])
    reports = threading.Event()
    if phase == "the report":
        stock = thread.get_and_clear_finished_requests
        monkeypatch.setattr(
            thread, "get_and_clear_finished_requests", lambda self: stock(self) if reports.is_set() else set()
        )
    with scripted(cohort.engine, *gets):
        if phase == "the queue":
            cohort.arrive(**others)
            for get in gets:
                assert get.reached.wait(HANG_S)
        cohort.arrive(**tailed(trunk, "leader", "follower"))
        cohort.step(3)
        clock.advance(BUDGET_S - TICK_S)
        cohort.step(3)
        assert not cohort.running("follower")
        clock.advance(TICK_S)
        cohort.step(2)
        assert cohort.running("follower")
        cohort.finish("follower")
        assert not cohort.finished["leader"]
        reports.set()
        for get in gets:
            get.release.set()
        cohort.finish()
    cohort.expect_equal(reference)


@pytest.mark.parametrize("event", ["leader fails", "deadline", "leader lands", "abort"])
def test_an_idle_engine_moves_on_without_new_traffic(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int], event: str
) -> None:
    """local-inference-lab/vllm#191, hazards C5, B4: recovery resumed only when the next unrelated request
    came, minutes later; ROCm/ATOM#2175: a stale id kept the loop busy for ever. Nothing else is going on;
    from the event it takes the step that reports it and the one that runs, and at the end the engine says
    that it has no work."""
    get = hang(then=fail_keys() if event == "leader fails" else None)
    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, "leader", "follower"))
        cohort.step(20)
        if event == "deadline":
            clock.advance(BUDGET_S)
        elif event == "abort":
            cohort.abort("follower")
        else:
            get.release.set()
            cohort.engine.worker_connector.connector_worker.recv_request_queue.join()
        cohort.step(2)
        if event == "abort":
            assert cohort.id("follower") is None
        elif event == "leader fails":
            # It leads again, since it may once: its own Get is on its way.
            assert cohort.flight("follower")
        else:
            assert cohort.running("follower")
        get.release.set()
        cohort.finish()
        cohort.engine.settle()
        assert not cohort.engine.scheduler.has_requests()
        assert not cohort.engine.llm.has_unfinished_requests()
    cohort.expect_equal(reference, *(["leader"] if event == "leader fails" else []))


@pytest.mark.parametrize("first", ["lands", "fails"])
def test_the_end_of_an_overdue_flight_does_not_touch_the_one_that_replaced_it(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int], first: str
) -> None:
    """golang/go#31420, hazard H4: the clean-up of a forgotten call deleted the entry of its successor. The
    first flight hangs past its follower's deadline; a newcomer leads anew; the first flight ends while the
    second is in the air. If it failed, the next newcomer joins the second, in the second's blocks; if it
    landed, the next newcomer has a local hit. Two Gets, no third."""
    prompts = tailed(trunk, "leader", "follower", "anew", "joins")
    # An exception says nothing about a key: a block that is known to be broken is not waited for at all.
    failing = raise_(RuntimeError("test: the wire is cut"))
    gets = [hang(then=None if first == "lands" else failing), hang()]
    with scripted(cohort.engine, *gets):
        cohort.arrive(leader=prompts["leader"], follower=prompts["follower"])
        one = cohort.flight("leader")
        clock.advance(BUDGET_S)
        cohort.step()
        assert one.state is State.OVERDUE
        cohort.abort("follower")  # or it would compute the prefix, and nobody would load it again
        cohort.arrive(anew=prompts["anew"])
        two = cohort.flight("anew")
        assert two is not one
        gets[0].release.set()
        cohort.finish("leader")
        if first == "fails":
            cohort.arrive(joins=prompts["joins"])
            assert list(two.followers) == [cohort.id("joins")]
            assert cohort.blocks("joins") == {block.block_id for block in two.destination}
        else:
            cohort.add(joins=prompts["joins"])
            cohort.finish("joins")
        assert two.state is State.LOADING
        gets[1].release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 2
    cohort.expect_equal(reference, *(["leader"] if first == "fails" else []))


def test_a_hand_over_does_not_start_the_deadline_again(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int]
) -> None:
    """Hazards E7, J2: the leader's load fails after six seconds; one follower leads again, the other
    attaches to it, and has 4.25 s left, not 10.25. When they are over it falls back; but it does not speak
    for everybody: the second flight is young, and a newcomer may still join it."""
    prompts = tailed(trunk, "leader", "again", "impatient", "newcomer")
    newcomer = prompts.pop("newcomer")
    # An exception says nothing about a key: a newcomer would not wait for a block that is known to be broken.
    gets = [hang(then=raise_(RuntimeError("test: the wire is cut"))), hang()]
    with scripted(cohort.engine, *gets):
        cohort.arrive(**prompts)
        clock.advance(6)
        gets[0].release.set()
        cohort.until(gets[1].reached.is_set)
        flight = cohort.flight("again")
        assert list(flight.followers) == [cohort.id("impatient")]
        clock.advance(BUDGET_S - 6 - TICK_S)
        cohort.step(5)
        assert cohort.fell_back() == {Reason.LEADER_FAILED: 2}
        cohort.arrive(newcomer=newcomer)
        clock.advance(TICK_S)
        cohort.step(2)
        assert cohort.fell_back() == {Reason.LEADER_FAILED: 2, Reason.DEADLINE: 1}
        assert cohort.running("impatient")
        assert flight.joinable
        assert list(flight.followers) == [cohort.id("newcomer")]
        gets[1].release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 2
    cohort.expect_equal(reference, "leader")


def test_a_slow_store_does_not_switch_the_sharing_off(
    cohort: Cohort, clock: Clock, reference: Arm, trunk: list[int]
) -> None:
    """linera-protocol#6700, hazard J2: a window shorter than the latency of a storm switched the merging
    off exactly when it was needed. Joining ends with the flight, not after some time: a load that has been
    in the air for nine seconds is joined as one of the first millisecond is."""
    prompts = tailed(trunk, *(f"r{i}" for i in range(10)))
    get = hang()
    with scripted(cohort.engine, get):
        for name, prompt in prompts.items():
            cohort.arrive(**{name: prompt})
            clock.advance(1)
        assert cohort.flight("r0").fan_in == 10
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    assert cohort.fell_back() == {}
    cohort.expect_equal(reference)


def test_at_the_bound_of_the_table_loads_are_stock_loads(
    cohort: Cohort, clock: Clock, configured: Callable[..., None], reference: Arm, salt: int, trunk: list[int]
) -> None:
    """Hazard J2: a cap that was no bound. There is room for one flight of four blocks; two requests for
    another prefix load it as the stock connector would, each for itself, which is counted; the table never
    has a fifth block."""
    configured(max_blocks=4)
    other = blocks(11, 12, salt=salt)
    store_prefixes(cohort.engine, other)
    unregistered = cohort.table.stats.unregistered
    get = hang(3)
    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, "leader", "follower"), x=[*other, 7], y=[*other, 8])
        assert len(cohort.table) == 4
        assert cohort.table.stats.unregistered - unregistered == 2
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 3
    cohort.expect_equal(reference)


def test_one_stuck_flight_holds_up_neither_the_others_nor_their_deadlines(
    cohort: Cohort, clock: Clock, configured: Callable[..., None], reference: Arm, salt: int, trunk: list[int]
) -> None:
    """caffeine#1954, hazard J3: an entry that never completed stood at the head of the expiry queue and
    blocked all that came after it. The first flight hangs and its follower has an hour; twenty later ones
    come and go; a second hung one, whose follower has the usual budget, is let go of on time."""
    short = [blocks(100 + i, salt=salt) for i in range(20)]
    second = blocks(11, 12, 13, 14, salt=salt)
    store_prefixes(cohort.engine, second, *short)
    gets = [hang(when=lambda keys: len(keys) == 4), hang(when=lambda keys: len(keys) == 4)]
    with scripted(cohort.engine, *gets):
        configured(deadline_base_s=3600.0)
        cohort.arrive(**tailed(trunk, "leader", "patient"))
        configured(deadline_base_s=10.0)
        for i, prefix in enumerate(short):
            cohort.add(**tailed(prefix, f"s{i}", f"t{i}"))
        cohort.finish(*(f"{c}{i}" for c, i in itertools.product("st", range(20))))
        assert len(cohort.table._flights) == 1
        assert not cohort.table._members.keys() - {cohort.id("patient")}
        cohort.arrive(**tailed(second, "other", "hurried"))
        clock.advance(BUDGET_S)
        cohort.finish("hurried")
        assert cohort.fell_back() == {Reason.DEADLINE: 1}
        assert list(cohort.table._members) == [cohort.id("patient")]
        for get in gets:
            get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 22
    cohort.expect_equal(reference)


def test_deadlines_learn_from_loads_that_took_long(
    cohort: Cohort, clock: Clock, configured: Callable[..., None], reference: Arm, salt: int, trunk: list[int]
) -> None:
    """Hazards C1, J2: with `deadline_learned_factor` 3, after a load of eight seconds a follower waits 24:
    a store that is slow is not one that is dead. At 24 s to the tick it is."""
    configured(deadline_learned_factor=3.0)
    second = blocks(11, 12, 13, 14, salt=salt)
    store_prefixes(cohort.engine, second)
    slow: list[Fault] = [hang(), hang()]
    with scripted(cohort.engine, *slow):
        cohort.arrive(**tailed(trunk, "slow", "waits"))
        clock.advance(8)
        slow[0].release.set()
        cohort.finish()
        cohort.arrive(**tailed(second, "hung", "learned"))
        clock.advance(24 - TICK_S)
        cohort.step(5)
        assert cohort.fell_back() == {}
        clock.advance(TICK_S)
        cohort.step(2)
        assert cohort.running("learned")
        assert cohort.fell_back() == {Reason.DEADLINE: 1}
        slow[1].release.set()
        cohort.finish()
    cohort.expect_equal(reference)


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
        cohort.arrive(**prompts)
        cohort.engine.core.pause_scheduler(mode="keep", clear_cache=False)
        get.release.set()
        cohort.engine.worker_connector.connector_worker.recv_request_queue.join()
        clock.advance(1000)
        cohort.engine.core.resume_scheduler()
        cohort.finish()
    assert cohort.fell_back() == {}
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)
