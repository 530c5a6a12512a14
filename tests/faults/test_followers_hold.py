"""What a follower holds while it waits, what it lets go of, and when it goes on."""

from __future__ import annotations

import time
from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from tests.faults.pressure import free, pool_of, request_named, run, to_the_end
from tests.support import BLOCK, STUCK_S, blocks, expect_equal, finish, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("guarded")]


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
    pool, stats = engine.scheduler.kv_cache_manager.block_pool, engine.connector.layer.table.stats
    cached = [pool.get_cached_block(h, [0]) for h in request_named(engine, "leader").block_hashes[:2]]
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
    """Hazard G5, the other half: once attached, a follower holds its local hit; taking every free block of
    the pool does not touch it."""
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
    """vllm#44294, inference-sim#1590, hazards B1, B4: twenty requests are parked in one pass with their
    leader, and when its Get has ended, at most two steps later all twenty have their first token, in the
    same step. With the prefix in the local cache, nobody waits and nothing is registered."""
    trunk = blocks(*range(1, 9), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(20)}
    engine.gate.open.clear()
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt)
    engine.step()
    assert len(engine.recorder.waiting) == 20
    engine.gate.open.set()
    limit = time.monotonic() + STUCK_S
    while not engine.recorder.complete:  # no step is made, so the landing cannot be noticed meanwhile
        assert time.monotonic() < limit
    outputs = [engine.step() for _ in range(3)]
    assert 20 in map(len, outputs), "the first tokens of all, in one step"
    burst_tokens = to_the_end(engine)
    expect_equal(reference, prompts, burst_tokens)
    assert engine.recorder.take().gets == 1
    flights = engine.connector.layer.table.stats.flights
    warm = run(engine, {f"again-{name}": prompt for name, prompt in prompts.items()})
    assert warm == {f"again-{name}": answer for name, answer in burst_tokens.items()}
    assert engine.connector.layer.table.stats.flights == flights
    assert engine.recorder.take().gets == 0


def test_requests_that_plan_and_never_load_leave_nothing(engine: Engine, salt: int) -> None:
    """FlexKV#176, LMCache#1034, hazard J1: forty requests are looked up, pass after pass, in a pool without
    room; then half are aborted, and half find the prefix computed by somebody else. The table holds the one
    flight that is in the air and no member, at every step."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    attach = engine.connector.layer
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
    attach, pool = engine.connector.layer, engine.scheduler.kv_cache_manager.block_pool
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
