"""A pool that is nearly full: parked loads, remainders, preemption, a restart beside old claims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.core.stats import Reason
from tests.faults.pressure import free, pool_of, run, to_the_end
from tests.faults.scripted_store import Fault, fail_keys, hang, scripted
from tests.support import blocks, expect_equal, finish, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm
    from tests.faults.cohort import Cohort
    from tests.support import Clock

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("guarded")]


def test_followers_of_a_failed_leader_restart_in_a_pool_that_their_old_claims_would_fill(
    engine: Engine, reference: Arm, salt: int, policy: str
) -> None:
    """vllm#45388, hazards F1, F2, E7: eight requests share eight pending blocks in a pool for 40. The load
    fails. vLLM still counts each follower as a prefill in flight that needs nine more blocks, 63 in all, and
    admits a load only beside those: the first to load again would wait for itself."""
    trunk = blocks(*range(1, 9), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(8)}
    with pool_of(engine, 40):
        engine.gate.open.clear()
        with scripted(engine, fail_keys()):
            _, _ = until_scheduled(engine, prompts)
            engine.gate.open.set()
            tokens = to_the_end(engine)
    if policy == "fail":
        assert tokens.pop("r0") == []
        prompts.pop("r0")
    expect_equal(reference, prompts, tokens)


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "with one prefix"])
def test_two_parked_loads_of_whole_prompts_in_a_pool_for_less_than_both(
    engine: Engine, reference: Arm, salt: int, shared: bool
) -> None:
    """vllm#57104, hazard F1 (there 4,096 and 4,080 tokens on 511 blocks; here 16 blocks and 16 less 16
    tokens on 31): both prompts are in the store as a whole, both need a 17th block for what they generate.
    Where they share all but the last block, its blocks are counted once and both are parked at the same
    time."""
    one = blocks(*range(1, 17), salt=salt)
    other = one if shared else blocks(*range(21, 37), salt=salt)
    store_prefixes(engine, one, other)
    prompts = {"one": one, "other": other[:-16]}
    with pool_of(engine, 31):
        engine.gate.open.clear()
        for request_id, prompt in prompts.items():
            engine.add(request_id, prompt, 40)
        for _ in range(5):
            engine.step()
        # 15 blocks to load each, since the last token is always computed.
        assert free(engine) == 31 - (15 if shared else 30)
        engine.gate.open.set()
        tokens = to_the_end(engine)
    counts = engine.recorder.take()
    assert counts.keys >= (15 if shared else 30)
    assert tokens == reference.ask("burst", prompts=prompts, max_tokens=40)["tokens"]


def test_two_cohorts_whose_remainders_do_not_fit_beside_each_other(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """vllm#45388, hazard F2 (there 512 + 736 of 2,048 blocks held, 799 free, neither fits; here 8 + 11 of
    32): two cohorts of four; each member has 13 more blocks to compute, for itself alone. One at a time
    fits."""
    a, b = blocks(*range(1, 9), salt=salt), blocks(*range(21, 32), salt=salt)
    store_prefixes(engine, a, b)
    prompts = {
        f"{name}{i}": [*prefix, *blocks(*range(start + 20 * i, start + 20 * i + 13), salt=salt), 7]
        for name, prefix, start in (("a", a, 100), ("b", b, 300))
        for i in range(4)
    }
    with pool_of(engine, 32):
        tokens = run(engine, prompts)
    expect_equal(reference, prompts, tokens)


def test_many_requests_few_prefixes_and_a_pool_for_three(engine: Engine, reference: Arm, salt: int) -> None:
    """LMCache#2080, hazards F3, J1: 100 requests for ten prefixes of six blocks in a pool for three, every
    ninth aborted while it waits. What is in the air never exceeds the pool, and the table knows nothing
    else."""
    trunks = [blocks(*range(10 * i, 10 * i + 6), salt=salt) for i in range(10)]
    store_prefixes(engine, *trunks)
    prompts = {f"r{i}": [*trunks[i % 10], *(7 + i for _ in range(4))] for i in range(100)}
    attach = engine.connector.layer
    with pool_of(engine, 21):
        for request_id, prompt in prompts.items():
            engine.add(request_id, prompt)
        for i in range(5):
            engine.step()
            engine.llm.abort_request([f"r{i * 9 + 8}", f"r{i * 9 + 50}"])
            in_the_air = {
                block.block_id for flight in attach.table._flights.values() for block in flight.destination
            }
            assert len(in_the_air) == len(attach.table) <= 21
        tokens = to_the_end(engine)
    expect_equal(reference, {k: prompts[k] for k in tokens}, tokens)
    assert len(tokens) >= 90


def test_preemption_where_the_victims_share_their_blocks(engine: Engine, reference: Arm, salt: int) -> None:
    """vllm#49674, hazard F4: eight requests share eight blocks, and the pool has no room for what they
    generate. Preempting one gives back only what is its own. Each step preempts at most as many as run,
    none is preempted for ever, and all finish."""
    trunk = blocks(*range(1, 9), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(8)}
    victims: list[str] = []
    stock = engine.scheduler._preempt_request

    def preempt(request: Any, *arguments: Any, **keywords: Any) -> None:
        victims.append(request.request_id)
        stock(request, *arguments, **keywords)

    engine.scheduler._preempt_request = preempt
    try:
        with pool_of(engine, 20):
            tokens = run(engine, prompts, max_tokens=60)
    finally:
        del engine.scheduler._preempt_request
    assert 1 <= len(victims) <= 4 * len(prompts)
    assert tokens == reference.ask("burst", prompts=prompts, max_tokens=60)["tokens"]


def test_a_preempted_cohort_plans_anew(engine: Engine, reference: Arm, salt: int) -> None:
    """vllm#53250, LMCache#3540, hazard F6: the flight has landed and its four members run, when all are
    preempted and the local cache is emptied. Nobody waits for the finished flight: one leads again, with
    what it has generated, and the others attach. (The stock connector throws the new load away: vLLM names
    the request as preempted in the pass that planned it, and it waits for ever.)"""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(4)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, 40)
    while len(engine.scheduler.running) < 4:
        engine.step()
    # vLLM refuses the reset while a store job reads the blocks.
    engine.worker_connector.connector_worker.kv_send_thread.request_queue.join()
    engine.step()
    assert len(engine.scheduler.running) == 4
    attached = engine.connector.layer.table.stats.attached
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    tokens = to_the_end(engine)
    assert engine.recorder.take().gets == 2
    assert engine.connector.layer.table.stats.attached - attached == 3
    assert tokens == reference.ask("burst", prompts=prompts, max_tokens=40)["tokens"]


def test_a_follower_passes_a_load_that_stands_in_line(
    engine: Engine, reference: Arm, salt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#42568, hazard F7: four hanging loads occupy the four receive threads; the leader's load stands
    behind them, and a follower of any urgency stands there with it. A flight has no priority: at its
    deadline the follower computes for itself and finishes, while the leader still stands in line."""
    others = [blocks(10 * i, 10 * i + 1, salt=salt) for i in range(4)]
    trunk = blocks(*range(51, 55), salt=salt)
    store_prefixes(engine, *others, trunk)
    now = [0.0]
    monkeypatch.setattr(engine.connector.layer, "_clock", lambda: now[0])
    hanging = hang(times=4)
    with scripted(engine, hanging):
        ahead = {f"ahead{i}": [*other, 7] for i, other in enumerate(others)}
        burst, steps = until_scheduled(engine, {**ahead, "leader": [*trunk, 7], "follower": [*trunk, 8]})
        now[0] = 1e6
        while "follower" not in burst.tokens:
            next(steps)
        assert burst.tokens.keys() == {"follower"}
        hanging.release.set()
        tokens = finish(engine, burst, steps)
    expect_equal(reference, {**ahead, "leader": [*trunk, 7], "follower": [*trunk, 8]}, tokens)


def test_who_fell_back_and_finds_no_room_does_not_hold_up_who_has_loaded(
    cohort: Cohort, clock: Clock, reference: Arm, salt: int
) -> None:
    """Hazards F1, F2, found in review: A's Get hangs and holds eight blocks. R adopts them, and needs 13 of
    its own when its deadline passes; twelve are free. vLLM has kept R's place before B, whose load is
    complete: with R in front, B would never run, and no room would be made. B finishes while A still hangs,
    and R in the room that B has left."""
    shared, other = blocks(*range(1, 9), salt=salt), blocks(*range(21, 26), salt=salt)
    store_prefixes(cohort.engine, shared, other)
    hung, late = hang(when=lambda keys: len(keys) == 8), hang(when=lambda keys: len(keys) == 5)
    own = blocks(*range(41, 45), salt=salt)
    with pool_of(cohort.engine, 8 + 5 + 12), scripted(cohort.engine, hung, late):
        cohort.arrive(a=[*shared, 7], r=[*shared, *own, 8], b=[*other, 9])
        clock.advance(1000)
        cohort.until(lambda: cohort.fell_back() == {Reason.DEADLINE: 1})
        cohort.step(3)
        assert not cohort.running("r")
        late.release.set()
        cohort.finish("b", "r")
        assert not cohort.finished["a"]
        hung.release.set()
        cohort.finish()
    cohort.expect_equal(reference)


@pytest.fixture
def recomputing(engine: Engine) -> Iterator[None]:
    """kv_load_failure_policy: recompute."""
    before = engine.scheduler.recompute_kv_load_failures
    engine.scheduler.recompute_kv_load_failures = True
    yield
    engine.scheduler.recompute_kv_load_failures = before


def failing(fault: Fault) -> Fault:
    """A Get that is held until its `release`, and then fails."""
    return hang(when=fault.when, then=fault)


@pytest.mark.usefixtures("recomputing")
@pytest.mark.parametrize("pool", [14, 18, 19, 20, 21, 24, 25, 26])
def test_a_follower_whose_own_load_has_failed_does_not_hold_up_who_has_loaded(
    cohort: Cohort, clock: Clock, reference: Arm, salt: int, pool: int
) -> None:
    """Found in review: A's Get hangs and holds eight blocks. R adopts them, and its own load of four fails. R
    goes on waiting for A; where B has found room beside it (from 19 on), B ends. At its deadline R
    starts again and needs 13 blocks. vLLM has kept its place before others, and still B ends in every pool
    while A hangs; where R fits beside A (from 21 on), R ends too."""
    shared, own = blocks(*range(1, 9), salt=salt), blocks(*range(41, 45), salt=salt)
    other = blocks(*range(21, 26), salt=salt)
    store_prefixes(cohort.engine, [*shared, *own], other)
    hung = hang(when=lambda keys: len(keys) == 8)
    broken = failing(replace(fail_keys(), when=lambda keys: len(keys) == 4))
    late = hang(when=lambda keys: len(keys) == 5)
    with pool_of(cohort.engine, pool), scripted(cohort.engine, hung, broken, late):
        cohort.arrive(a=[*shared, 7], r=[*shared, *own, 8])
        cohort.add(b=[*other, 9])
        cohort.step(3)
        broken.release.set()
        cohort.until(lambda: cohort.id("r") not in cohort.engine.connector.layer._loads)
        late.release.set()
        if pool >= 19:
            cohort.finish("b")
        clock.advance(1000)
        cohort.finish("b", *(["r"] if pool >= 21 else []))
        assert not cohort.finished["a"]
        hung.release.set()
        cohort.finish()
    cohort.expect_equal(reference)


@pytest.mark.usefixtures("recomputing")
@pytest.mark.parametrize("pool", [18, 19, 20, 21, 24, 25, 26])
def test_a_leader_whose_load_has_failed_does_not_hold_up_who_has_loaded(
    cohort: Cohort, clock: Clock, reference: Arm, salt: int, pool: int
) -> None:
    """The same for a leader: L's load of eight fails while its follower F, whose own load of four hangs, goes
    on holding all twelve blocks. In every pool with room for B beside F, B ends while F still hangs; where L
    fits too (from 21 on), so does L."""
    shared, own = blocks(*range(1, 9), salt=salt), blocks(*range(41, 45), salt=salt)
    other = blocks(*range(21, 26), salt=salt)
    store_prefixes(cohort.engine, [*shared, *own], other)
    broken = failing(replace(fail_keys(), when=lambda keys: len(keys) == 8))
    hung, late = hang(when=lambda keys: len(keys) == 4), hang(when=lambda keys: len(keys) == 5)
    with pool_of(cohort.engine, pool), scripted(cohort.engine, hung, broken, late):
        cohort.arrive(l=[*shared, 7], f=[*shared, *own, 8])
        cohort.add(b=[*other, 9])
        cohort.step(3)
        broken.release.set()
        cohort.until(lambda: not cohort.waiting_for_the_store("l"))
        late.release.set()
        cohort.finish("b", *(["l"] if pool >= 21 else []))
        assert not cohort.finished["f"]
        hung.release.set()
        cohort.finish()
    cohort.expect_equal(reference)
