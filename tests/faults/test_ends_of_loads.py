"""How a load ends, and what others see of it in between: reports, publication, re-entrancy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from connector_patch.lab import memory
from singleflight.core.stats import Reason
from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import (
    RUBBISH,
    Fault,
    Get,
    at_once,
    fail_keys,
    hang,
    raise_,
    scribble,
    scripted,
)

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


def test_a_failed_load_is_reported_by_its_request_and_in_no_other_way(
    cohort: Cohort, reference: Arm, trunk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-ascend#13099, hazard E4: the failure was noted where nobody looked. Real worker, real thread,
    one key of four with an error: what reaches the scheduler is the leader's id, once, and no block ids,
    which it would take to belong to one request."""
    threads = cohort.engine.worker_connector.connector_worker.kv_recv_threads
    stock = cohort.engine.worker_connector.get_transfer_results
    failed: list[str] = []
    invalid: set[int] = set()

    def results(finished: set[str]) -> Any:
        invalid.update(*(thread._invalid_block_ids for thread in threads))
        answer = stock(finished)
        failed.extend(answer.failed_recving)
        return answer

    monkeypatch.setattr(cohort.engine.worker_connector, "get_transfer_results", results)
    cohort.engine.gate.open.clear()
    with scripted(cohort.engine, fail_keys(2)):
        cohort.arrive(**tailed(trunk, "leader", "f0", "f1"))
        leader = cohort.id("leader")
        cohort.engine.gate.open.set()
        cohort.finish()
    assert failed == [leader]
    assert not invalid
    cohort.expect_equal(reference, "leader")


def test_this_suite_notices_a_failure_that_is_noted_in_a_private_place(
    cohort: Cohort, reference: Arm, trunk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard E4, the mutation of that bug: each thread notes failures in a set of its own. The load passes
    for a success, its rubbish is read by everybody, and the comparison with plain vLLM says so."""
    for thread in cohort.engine.worker_connector.connector_worker.kv_recv_threads:
        monkeypatch.setattr(thread, "set_failed_request", set().add)
    cohort.engine.gate.open.clear()
    with scripted(cohort.engine, scribble()):
        cohort.arrive(**tailed(trunk, "leader", "f0", "f1"))
        cohort.engine.gate.open.set()
        cohort.finish()
    with pytest.raises(AssertionError):
        cohort.expect_equal(reference)


def test_of_a_load_that_failed_in_part_nothing_but_right_bytes_is_ever_visible(
    cohort: Cohort, reference: Arm, trunk: list[int], policy: str
) -> None:
    """FlexKV#232, sglang#8901, hazards E1, E6: [ok, ok, fail, ok]. A reader looks after every step, from
    before the load to the end: a block that is a prefix-cache hit has the bytes that the store has for it,
    whoever wrote them. The load as such publishes nothing, not even the two good blocks before the bad one;
    what becomes visible is the leader's recomputation ("recompute") or the second load ("fail")."""
    pool = cohort.engine.scheduler.kv_cache_manager.block_pool
    right: list[bytes] = []
    places: list[list[int]] = []
    lengths: list[int] = []

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        answers = get()
        lengths.extend(sizes[0])
        places.extend(addresses)
        right.extend(b"".join(map(memory.read, a, s)) for a, s in zip(addresses, sizes, strict=True))
        for address, size in zip(addresses[2], sizes[2], strict=True):
            memory.fill(address, RUBBISH, size)
        answers[2] = -704
        return answers

    def read(block_id: int) -> bytes:
        """A GPU block's bytes: each part of it lies a whole number of blocks away from the loaded one's."""
        away = block_id - destination[0]
        return b"".join(memory.read(a + away * s, s) for a, s in zip(places[0], lengths, strict=True))

    seen = 0
    get = hang(then=Fault(act))
    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, "leader", "f0", "f1"))
        hashes = list(cohort.request("leader").block_hashes)[:4]
        destination = [block.block_id for block in cohort.flight("leader").destination]

        def check() -> int:
            hits = [pool.get_cached_block(block_hash, [0]) for block_hash in hashes]
            for hit, bytes_ in zip(hits, right, strict=False):
                if hit:
                    is_, ought = (np.frombuffer(b, np.float32) for b in (read(hit[0].block_id), bytes_))
                    np.testing.assert_allclose(is_, ought, rtol=1e-2, atol=1e-3)
            return sum(map(bool, hits))

        assert check() == 0
        get.release.set()
        assert get.left.wait(60)
        assert read(destination[1]) == right[1]
        assert read(destination[2]) != right[2]
        while len(cohort.finished) < 3:
            cohort.step()
            seen = max(seen, check())
    assert seen == 4
    cohort.expect_equal(reference, *([] if policy == "recompute" else ["leader"]))


@pytest.mark.parametrize(
    "error", [MemoryError(), KeyboardInterrupt(), SystemExit(), GeneratorExit()], ids=repr
)
def test_a_key_whose_load_ended_in_an_exception_is_not_poisoned(
    cohort: Cohort, reference: Arm, trunk: list[int], error: BaseException
) -> None:
    """golang/go#41133, groupcache#139, seaweedfs#9100, hazard H3: an exception in the loader left the entry
    in the table, or released the waiters as if all were well. Four loads in a row, as many as there are
    threads, end in one that may not even be an Exception: followers fall back with a reason, the entry is
    gone, and the fifth, of the same key, is like any other."""
    prompts = {f"r{i}": prompt for i, prompt in enumerate(tailed(trunk, *map(str, range(6))).values())}
    with scripted(cohort.engine, raise_(error, times=4)):
        for i in (0, 3):
            cohort.add(**{f"r{i + j}": prompts[f"r{i + j}"] for j in range(3)})
            cohort.finish(*(f"r{i + j}" for j in range(3)))
            assert len(cohort.table) == 0
            cohort.engine.cold()
        assert cohort.fell_back() == {Reason.LEADER_FAILED: 2 * (2 + 1)}
        cohort.add(**tailed(trunk, "after0", "after1"))
        cohort.finish()
    assert cohort.engine.recorder.take().gets == 4 + 1
    cohort.expect_equal(reference, "r0", "r1", "r3", "r4")


def test_followers_do_not_need_their_leader_to_be_scheduled(
    cohort: Cohort, reference: Arm, trunk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """moka#240, dialog-db#491, hazard H5: progress that depends on the first caller being polled. The
    leader's load is complete, but the scheduler never comes to promote the leader; its followers run, and a
    newcomer has a local hit, all the same."""
    prompts = tailed(trunk, "leader", "f0", "f1", "newcomer")
    newcomer = prompts.pop("newcomer")
    cohort.engine.gate.open.clear()
    cohort.arrive(**prompts)
    starved = {cohort.id("leader")}
    stock = cohort.engine.scheduler._handle_blocked_waiting_request
    monkeypatch.setattr(
        cohort.engine.scheduler,
        "_handle_blocked_waiting_request",
        lambda request: request.request_id not in starved and stock(request),
    )
    cohort.engine.gate.open.set()
    cohort.finish("f0", "f1")
    cohort.add(newcomer=newcomer)
    cohort.finish("newcomer")
    assert not cohort.running("leader")
    starved.clear()
    cohort.finish()
    assert cohort.engine.recorder.take().gets == 1
    cohort.expect_equal(reference)


def test_whoever_looks_at_the_table_while_falling_back_does_not_meet_the_failed_flight(
    cohort: Cohort, reference: Arm, trunk: list[int], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """caffeine#372, hazard H8: a caller that retried from its failure callback was given the same failed
    future. At the very moment when a follower is told that its leader has failed, it looks its blocks up:
    none is pending, none is a prefix-cache hit."""
    attach = cohort.engine.connector.layer
    stock: Callable[..., str] = attach._let_go
    looked: list[int] = []

    def let_go(effect: Any) -> str:
        request = attach._pending[effect.request].request
        run = attach._pending_run(request, 0, 4)
        hit = cohort.engine.scheduler.kv_cache_manager.block_pool.get_cached_block(
            request.block_hashes[0], [0]
        )
        looked.append(len(run) + len(run.segments) + bool(hit))
        return stock(effect)

    cohort.engine.gate.open.clear()
    with scripted(cohort.engine, fail_keys()):
        cohort.arrive(**tailed(trunk, "leader", "f0", "f1"))
        with monkeypatch.context() as patch:
            patch.setattr(attach, "_let_go", let_go)
            cohort.engine.gate.open.set()
            cohort.until(lambda: looked)
        cohort.finish()
    assert looked == [0, 0]
    cohort.expect_equal(reference, *([] if policy == "recompute" else ["leader"]))


@pytest.mark.parametrize("end", ["success", "failure"])
def test_a_load_that_is_complete_before_its_submission_returns(
    cohort: Cohort, reference: Arm, trunk: list[int], policy: str, end: str
) -> None:
    """onebusaway-android#1588, hazard H9: work that finishes inside the call that starts it cleans up an
    entry that is still being made. Five requests come in one step and the Get is over before the step is:
    it succeeds, or fails. Nothing waits for it, nothing is left of it."""
    names = [f"r{i}" for i in range(5)]
    with scripted(cohort.engine, *([fail_keys()] if end == "failure" else [])), at_once(cohort.engine):
        cohort.add(**tailed(trunk, *names))
        cohort.step()
        assert cohort.engine.recorder.counts.gets == 1
        assert len(cohort.table) == 0
        cohort.finish()
    again = end == "failure" and policy == "fail"
    assert cohort.engine.recorder.take().gets == (2 if again else 1)
    cohort.expect_equal(reference, *(["r0"] if again else []))
