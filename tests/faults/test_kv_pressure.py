"""A pool that is nearly full: parked loads, shared blocks, preemption, eviction between two passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.checksums import Guard, guard
from tests.faults.scripted_store import fail_keys, hang, scripted
from tests.support import BLOCK, blocks, expect_equal, finish, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.engine import Engine
    from singleflight.arms import Arm

pytestmark = pytest.mark.engine

EMPTY_STEPS = 200
"""Steps in a row in which nothing is computed and no load is in the air: a deadlock."""


@contextlib.contextmanager
def pool_of(engine: Engine, count: int) -> Iterator[Callable[[int], None]]:
    """Only `count` blocks for everybody; the rest is held back. Call the result to change the count."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    held: list[Any] = []

    def squeeze(count: int) -> None:
        difference = pool.get_num_free_blocks() - count
        if difference > 0:
            held.extend(pool.get_new_blocks(difference))
        elif difference < 0:
            pool.free_blocks(held[difference:])
            del held[difference:]

    squeeze(count)
    try:
        yield squeeze
    finally:
        pool.free_blocks(held)


@pytest.fixture(autouse=True)
def guarded(engine: Engine) -> Iterator[Guard]:
    """What the prefix cache shows at the end of each test is what the store holds (hazard F5)."""
    with guard(engine) as watching:
        yield watching


def free(engine: Engine) -> int:
    return int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def run(engine: Engine, prompts: Mapping[str, Sequence[int]], max_tokens: int = 4) -> dict[str, list[int]]:
    """Add all at once and step to the end; a deadlock is a failure."""
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens)
    return to_the_end(engine)


def to_the_end(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    empty = 0
    while engine.llm.has_unfinished_requests():
        before = progress(engine)
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        idle = progress(engine) == before and not loading(engine)
        empty = empty + 1 if idle else 0
        assert empty < EMPTY_STEPS, f"deadlock: {engine.connector.attach.table!r}"
    return tokens


def progress(engine: Engine) -> tuple[int, ...]:
    requests = engine.scheduler.requests.values()
    return len(requests), sum(r.num_computed_tokens for r in requests), sum(r.num_tokens for r in requests)


def loading(engine: Engine) -> bool:
    return any(p.loading for p in engine.connector.attach._pending.values())


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
    """vllm#57104, hazard F1 (there 4,096 and 4,080 tokens on 511 blocks; here 16 blocks and 16 less 16 tokens
    on 31): both prompts are in the store as a whole, both need a 17th block for what they generate. Where they
    share all but the last block, its blocks are counted once and both are parked at the same time."""
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
    """vllm#45388, hazard F2 (there 512 + 736 of 2,048 blocks held, 799 free, neither fits; here 8 + 11 of 32):
    two cohorts of four; each member has 13 more blocks to compute, for itself alone. One at a time fits."""
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
    attach = engine.connector.attach
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
    """vllm#49674, hazard F4: eight requests share eight blocks, and the pool has no room for what they generate.
    Preempting one gives back only what is its own. Each step preempts at most as many as run, none is preempted
    for ever, and all finish."""
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
    preempted and the local cache is emptied. Nobody waits for the finished flight: one leads again, with what
    it has generated, and the others attach. (The stock connector throws the new load away: vLLM names the
    request as preempted in the pass that planned it, and it waits for ever.)"""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(4)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, 12)
    while len(engine.scheduler.running) < 4:
        engine.step()
    for _ in range(3):
        engine.step()
    attached = engine.connector.attach.table.stats.attached
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    tokens = to_the_end(engine)
    assert engine.recorder.take().gets == 2
    assert engine.connector.attach.table.stats.attached - attached == 3
    assert tokens == reference.ask("burst", prompts=prompts, max_tokens=12)["tokens"]


def test_a_follower_passes_a_load_that_stands_in_line(
    engine: Engine, reference: Arm, salt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#42568, hazard F7: four hanging loads occupy the four receive threads; the leader's load stands behind
    them, and a follower of any urgency stands there with it. A flight has no priority: at its deadline the
    follower computes for itself and finishes, while the leader still stands in line."""
    others = [blocks(10 * i, 10 * i + 1, salt=salt) for i in range(4)]
    trunk = blocks(*range(51, 55), salt=salt)
    store_prefixes(engine, *others, trunk)
    now = [0.0]
    monkeypatch.setattr(engine.connector.attach, "_clock", lambda: now[0])
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


def test_a_waiting_follower_owns_no_more_than_its_suffix(engine: Engine, reference: Arm, salt: int) -> None:
    """incoai/splash#16, hazard F8: of ten followers, nine need nothing but the pending blocks and take no
    block of the pool; the tenth has two more to load and takes two."""
    trunk = blocks(*range(1, 9), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk[: 6 * BLOCK], *(7 + i for _ in range(4))] for i in range(10)}
    prompts["longer"] = [*trunk, 7]
    with pool_of(engine, 30):
        engine.gate.open.clear()
        burst, steps = until_scheduled(engine, prompts)
        assert free(engine) == 30 - 6 - 2
        tokens = finish(engine, burst, steps)
    expect_equal(reference, prompts, tokens)


def test_a_local_hit_that_is_evicted_while_the_request_waits_for_room(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """LMCache#2971, #1922, hazards A5, G5: blocks 1-2 are a local hit beside the pending 1-8 of the leader. A
    request plans 1-2 local and 3-8 adopted, but there is no room for its own block; before there is, 1-2 are
    evicted. Its next plan adopts 1-8: no hole, and nothing is loaded twice."""
    trunk = blocks(*range(1, 9), salt=salt)
    store_prefixes(engine, trunk)
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, {"leader": [*trunk, 7]})
    engine.add("compute", [*trunk[: 2 * BLOCK], 11], prompt_logprobs=1)
    while "compute" not in burst.tokens:
        next(steps)
    pool, stats = engine.scheduler.kv_cache_manager.block_pool, engine.connector.attach.table.stats
    cached = [pool.get_cached_block(h, [0]) for h in _request(engine, "leader").block_hashes[:2]]
    assert all(cached)
    with pool_of(engine, 2) as squeeze:
        adopted = stats.blocks_adopted
        engine.add("waits", [*trunk, 8])
        for _ in range(3):
            engine.step()
        assert stats.blocks_adopted == adopted
        squeeze(0)
        squeeze(20)
        engine.step()
        assert stats.blocks_adopted - adopted == 8
        engine.gate.open.set()
        tokens = {**burst.tokens, **to_the_end(engine)}
    assert engine.recorder.take().keys == 8
    tokens.pop("compute")
    expect_equal(reference, {"leader": [*trunk, 7], "waits": [*trunk, 8]}, tokens)


def test_a_local_hit_of_a_waiting_follower_is_not_evicted(engine: Engine, reference: Arm, salt: int) -> None:
    """Hazard G5, the other half: once attached, a follower holds its local hit; taking every free block of the
    pool does not touch it."""
    trunk = blocks(*range(1, 9), salt=salt)
    store_prefixes(engine, trunk)
    engine.burst({"warm": [*trunk[: 2 * BLOCK], 11]}, max_tokens=1)
    prompts = {"leader": [*trunk, 7], "follower": [*trunk, 8]}
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, prompts)
    with pool_of(engine, 0) as squeeze:
        next(steps)
        squeeze(10)
        tokens = finish(engine, burst, steps)
    assert engine.recorder.take().keys == 2 + 6
    expect_equal(reference, prompts, tokens)


def test_followers_are_parked_and_released_together(engine: Engine, reference: Arm, salt: int) -> None:
    """vllm#44294, inference-sim#1590, hazards B1, B4: twenty requests are parked in one pass with their leader,
    and when its Get has ended, at most two steps later all twenty have their first token, in the same step.
    With the prefix in the local cache, nobody waits and nothing is registered."""
    trunk = blocks(*range(1, 9), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(20)}
    engine.gate.open.clear()
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt)
    engine.step()
    assert len(engine.recorder.waiting) == 20
    engine.gate.open.set()
    while not engine.recorder.complete:
        pass  # the receive thread; no step is made, so the landing cannot be noticed meanwhile
    for step in range(4):
        first = engine.step()
        if first:
            break
    assert len(first) == 20
    assert step <= 2
    tokens = to_the_end(engine)
    expect_equal(reference, prompts, tokens)
    assert engine.recorder.take().gets == 1
    flights = engine.connector.attach.table.stats.flights
    warm = run(engine, {f"again-{name}": prompt for name, prompt in prompts.items()})
    assert warm == {f"again-{name}": answer for name, answer in tokens.items()}
    assert engine.connector.attach.table.stats.flights == flights
    assert engine.recorder.take().gets == 0


def test_requests_that_plan_and_never_load_leave_nothing(engine: Engine, salt: int) -> None:
    """FlexKV#176, LMCache#1034, hazard J1: forty requests are looked up, pass after pass, in a pool without room;
    then half are aborted, and half find the prefix computed by somebody else. The table holds the one flight
    that is in the air and no member, at every step."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    attach = engine.connector.attach
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, {"leader": [*trunk, 7]})
    with pool_of(engine, 0):
        for i in range(40):
            engine.add(f"r{i}", [*trunk, *(8 + i for _ in range(4))], 1)
            next(steps)
            assert (len(attach.table), len(attach.table._flights), len(attach.table._members)) == (4, 1, 0)
        engine.llm.abort_request([f"r{i}" for i in range(0, 40, 2)])
        next(steps)
        assert len(attach._plans) <= 20
    finish(engine, burst, steps)
    assert engine.recorder.take().gets == 1
    assert not engine.connector.connector_scheduler.load_specs


def test_each_abort_drops_only_its_own_reference(engine: Engine, salt: int) -> None:
    """LMCache#1252, #1075, #3028, hazard J4: three requests for the same pending blocks come and go in all 90
    orders. After each event the blocks have one reference for each follower that is there, and the leader's,
    which stays until the load ends."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    attach, pool = engine.connector.attach, engine.scheduler.kv_cache_manager.block_pool
    orders = sorted(set(permutations("aabbcc")))
    assert len(orders) == 90
    for number, order in enumerate(orders):
        engine.gate.open.clear()
        there: set[str] = set()
        leader = ""
        for name in order:
            request_id = f"{name}{number}"
            if name in there:
                engine.llm.abort_request([request_id])
                there.remove(name)
            else:
                engine.add(request_id, [*trunk, *(7 + ord(name) for _ in range(4))], 1)
                there.add(name)
                leader = leader or name
            engine.step()
            engine.step()
            (flight,) = attach.table._flights.values()
            references = {pool.blocks[block.block_id].ref_cnt for block in flight.destination}
            assert references == {len(there - {leader}) + 1}, (order, name)
        engine.gate.open.set()
        engine.cold()


def _request(engine: Engine, name: str) -> Any:
    (request,) = (r for i, r in engine.scheduler.requests.items() if i.startswith(f"{name}-") or i == name)
    return request
