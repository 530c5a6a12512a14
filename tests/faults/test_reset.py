"""Resets with flights in the air: the answer is truthful, and nothing from before is served afterwards."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from connector_patch.lab import memory
from singleflight.core.stats import Reason
from tests.faults.scripted_store import HANG_S, Fault, Get, scripted
from tests.support import BLOCK, blocks, expect_equal, finish, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


def old_bytes(times: int = 1) -> Fault:
    """The Get brings what a policy before the weight update has written: whoever reads it is found out by
    its tokens. It succeeds, and ends only at `release`."""
    fault = Fault(lambda get, keys, addresses, sizes: [], times)

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        for address, size in zip(addresses, sizes, strict=True):
            for part, length in zip(address, size, strict=True):
                memory.fill(part, 0x3E, length)
        fault.release.wait(HANG_S)
        return [sum(parts) for parts in sizes]

    fault.act = act
    return fault


def test_a_load_that_ends_well_after_a_reset_is_served_to_nobody(
    engine: Engine, reference: Arm, salt: int, policy: str
) -> None:
    """Hazards G1, G2, G4; vllm#42695. A leader of four blocks, a follower that needs just these, one that
    also loads four of its own, and the leader of another flight that is aborted: all in the air when the
    operator resets both caches. vLLM says False, since blocks are in use. Then the Gets succeed, with bytes
    from before the reset. Followers leave with reason reset at once; leaders and own loads are thrown away
    when they end; everybody computes."""
    trunk = blocks(*range(1, 9), salt=salt)
    other = blocks(40, 41, salt=salt)
    store_prefixes(engine, trunk, other)
    prompts = {"leader": [*trunk[: 4 * BLOCK], 7], "short": [*trunk[: 4 * BLOCK], 8], "long": [*trunk, 9]}
    stats = engine.connector.layer.table.stats
    fell_back, discarded, landed = stats.fell_back[Reason.RESET], stats.discarded, stats.landed
    gets = old_bytes(times=3)
    with scripted(engine, gets):
        burst, steps = until_scheduled(engine, {**prompts, "orphan": [*other, 7], "orphaned": [*other, 8]})
        engine.llm.abort_request(["orphan"])
        assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
        assert not len(engine.connector.layer.table)
        assert stats.discarded - discarded == 3
        assert stats.fell_back[Reason.RESET] - fell_back == 3
        while "orphaned" not in burst.tokens:
            next(steps)  # nothing writes into its blocks, so it need not wait for the discarded load
        assert not burst.tokens.keys() & {"leader", "long"}, "their blocks are still being written"
        gets.release.set()
        tokens = finish(engine, burst, steps)
    assert stats.landed - landed == 3
    assert engine.recorder.take().gets == 3
    tokens.pop("orphan", None)
    expect_equal(reference, {**prompts, "orphaned": [*other, 8]}, tokens)
    # Nor is anything of it in either cache now: first locally, then from the store.
    for name in ("local", "stored"):
        again = engine.burst({f"{name}-{who}": prompt for who, prompt in prompts.items()})
        expect_equal(reference, {f"{name}-{who}": prompt for who, prompt in prompts.items()}, again.tokens)
        engine.cold()


def test_a_load_whose_objects_the_reset_has_removed(
    engine: Engine, reference: Arm, salt: int, policy: str
) -> None:
    """Hazard G1; vllm-facts: "under fail the loading requests error". The Get starts after the reset and
    finds nothing. The leader meets vLLM's policy, its followers have left already and compute."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, 7 + i] for i in range(4)}
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, prompts)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    tokens = finish(engine, burst, steps)
    assert engine.recorder.take().gets == 1, "nobody asks for the removed objects again"
    if policy == "fail":
        assert tokens.pop("r0") == []
        prompts.pop("r0")
    expect_equal(reference, prompts, tokens)


def test_a_connector_reset_alone_says_true_and_keeps_its_word(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard G1; vllm#57727. vLLM's reset_connector_cache does not look at blocks in use. It says True with a
    flight in the air: so the flight must not be served either."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, 7 + i] for i in range(3)}
    gets = old_bytes()
    with scripted(engine, gets):
        burst, steps = until_scheduled(engine, prompts)
        assert engine.scheduler.reset_connector_cache() is True
        gets.release.set()
        tokens = finish(engine, burst, steps)
    expect_equal(reference, prompts, tokens)


def test_newcomers_after_a_reset_do_not_join_what_was_in_the_air(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard G3; caffeine#193 (ABA). The discarded load still writes when a newcomer asks for the same
    blocks: it computes them, and its blocks are the ones that later requests hit, also after the
    discarded load has ended."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    gets = old_bytes()
    with scripted(engine, gets):
        burst, steps = until_scheduled(engine, {"leader": [*trunk, 7]})
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.add("newcomer", [*trunk, 8])
        while "newcomer" not in burst.tokens:
            next(steps)
        gets.release.set()
        tokens = finish(engine, burst, steps)
    late = engine.burst({"late": [*trunk, 9]})
    assert engine.recorder.take().gets == 1
    prompts = {"leader": [*trunk, 7], "newcomer": [*trunk, 8], "late": [*trunk, 9]}
    expect_equal(reference, prompts, {**tokens, **late.tokens})


def test_blocks_computed_while_they_are_loaded_stay_the_ones_that_are_hit(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard G3, without a reset. While the leader's Get hangs, a request with prompt logprobs computes and
    publishes the same blocks. The next request hits those and attaches to nothing. The landing does not
    take them away from it, and both copies are freed."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    stats = engine.connector.layer.table.stats
    attached = stats.attached
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, {"leader": [*trunk, 7]})
    engine.add("compute", [*trunk, 8], prompt_logprobs=1)
    while "compute" not in burst.tokens:
        next(steps)
    engine.add("hit", [*trunk, 9])
    while "hit" not in burst.tokens:
        next(steps)
    assert "leader" not in burst.tokens
    tokens = finish(engine, burst, steps)
    assert stats.attached == attached
    assert engine.recorder.take().gets == 1
    expect_equal(reference, {"leader": [*trunk, 7], "compute": [*trunk, 8], "hit": [*trunk, 9]}, tokens)


def test_a_reset_of_the_local_cache_in_mid_load_says_false_and_changes_nothing(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """vllm-facts: False; with reset_running_requests vLLM raises. Here too, and the flight lands as if nobody
    had asked: one Get for three requests."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, 7 + i] for i in range(3)}
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, prompts)
    assert engine.scheduler.reset_prefix_cache() is False
    with pytest.raises(RuntimeError, match="Failed to reset"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    tokens = finish(engine, burst, steps)
    assert engine.recorder.take().gets == 1
    expect_equal(reference, prompts, tokens)


def test_running_requests_are_preempted_by_a_reset_while_others_wait(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard G1; vllm#47823. A reset with reset_running_requests raises, but has preempted who was running by
    then: it starts again, beside a flight that goes on."""
    trunk, own = blocks(*range(1, 5), salt=salt), blocks(60, 61, salt=salt)
    store_prefixes(engine, trunk)
    prompts = {"running": [*own, 5], **{f"r{i}": [*trunk, 7 + i] for i in range(3)}}
    engine.gate.open.clear()
    engine.add("running", prompts["running"])
    engine.step()
    burst, steps = until_scheduled(engine, {k: prompts[k] for k in ("r0", "r1", "r2")})
    with pytest.raises(RuntimeError, match="Failed to reset"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    tokens = finish(engine, burst, steps)
    assert engine.recorder.take().gets == 1
    expect_equal(reference, prompts, tokens)


def test_a_reset_with_nothing_in_the_air_says_true_and_the_store_is_empty(engine: Engine, salt: int) -> None:
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    engine.burst({"after": [*trunk, 7]})
    assert engine.recorder.take().gets == 0


def test_a_plan_that_no_block_was_free_for_is_dropped(engine: Engine, reference: Arm, salt: int) -> None:
    """Hazard G4. The pool is empty: a request has planned to adopt two pending blocks, but got none for its
    tail. The reset drops the plan with the flight; when blocks come free, it computes."""
    trunk = blocks(1, 2, salt=salt)
    store_prefixes(engine, trunk)
    gets = old_bytes()
    pool = engine.scheduler.kv_cache_manager.block_pool
    with scripted(engine, gets):
        burst, steps = until_scheduled(engine, {"leader": [*trunk, 7]})
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        engine.add("planned", [*trunk, 8])
        next(steps)
        attach = engine.connector.layer
        planned = list(attach._plans)
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        left = list(attach._plans)
        pool.free_blocks(taken)
        gets.release.set()
        tokens = finish(engine, burst, steps)
    assert len(planned) == 1
    assert not left
    expect_equal(reference, {"leader": [*trunk, 7], "planned": [*trunk, 8]}, tokens)


@pytest.mark.parametrize("seed", range(3))
def test_many_flights_that_end_in_any_order_after_a_reset(
    engine: Engine, reference: Arm, salt: int, policy: str, seed: int
) -> None:
    """Hazard G4; async-lru#503. Twelve flights with a follower each are in the air when the caches are
    reset, twice; then, in random order, some are aborted, some Gets fail and the others succeed."""
    chance = random.Random(seed)
    names = range(12)
    trunks = {n: blocks(100 + 2 * n, 101 + 2 * n, salt=salt) for n in names}
    store_prefixes(engine, *trunks.values())
    prompts = {f"{role}{n}": [*trunks[n], i] for n in names for i, role in enumerate(("lead", "follow"), 7)}
    gets, failed = old_bytes(times=12), chance.sample(names, 4)
    stock_act, met = gets.act, iter(range(12))

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        number = next(met)
        answers = stock_act(get, keys, addresses, sizes)
        return [-704 for _ in answers] if number in failed else answers

    gets.act = act
    with scripted(engine, gets):
        burst, steps = until_scheduled(engine, prompts)
        gone = chance.sample(sorted(prompts), 8)
        engine.llm.abort_request(gone[:3])
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.llm.abort_request(gone[3:6])
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        next(steps)
        engine.llm.abort_request(gone[6:])
        tokens = finish(engine, burst, steps) if gets.release.set() is None else {}
    assert engine.recorder.take().gets == 12
    lost = {k for k, v in tokens.items() if not v} | set(gone)
    assert len(lost - set(gone)) <= (4 if policy == "fail" else 0)
    assert all(name.startswith("lead") for name in lost - set(gone))
    alive = {k: v for k, v in prompts.items() if k not in lost}
    expect_equal(reference, alive, {k: tokens[k] for k in alive})
