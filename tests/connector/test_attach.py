"""Attach mode on a real engine and a real store: who loads what, into which blocks, and what comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import (
    BLOCK,
    blocks,
    expect_equal,
    finish,
    store_prefixes,
    until_scheduled,
)

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


def test_partial_overlap_fetches_each_block_once_and_each_suffix_at_once(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard A2. The leader loads 1-8 and is held; one follower needs 1-4 and its own 5'-6', another
    1-12, a third 1-8 from a local hit on 1-2. Their own suffixes arrive while the leader still hangs."""
    trunk = blocks(*range(1, 13), salt=salt)
    branch = blocks(1, 2, 3, 4, 50, 60, salt=salt)
    store_prefixes(engine, trunk, branch)
    prompts = {
        "leader": [*trunk[: 8 * BLOCK], 7],
        "branch": [*branch, 8],
        "longer": [*trunk, 9],
        "warm": [*trunk[: 8 * BLOCK], 10],
    }
    held: list[str] = []

    def first_only(keys: list[str]) -> bool:
        if not held:
            held.extend(keys)
        return held == keys

    engine.gate.concerns = first_only
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, {k: prompts[k] for k in ("leader", "branch", "longer")})
    # Blocks 1-2 become a local hit while 3-8 are in the air: prompt logprobs neither load nor attach.
    engine.add("compute", [*trunk[: 2 * BLOCK], 11], prompt_logprobs=1)
    while "compute" not in burst.tokens:
        next(steps)
    adopted_before = engine.connector.layer.table.stats.blocks_adopted
    warm, steps = until_scheduled(engine, {"warm": prompts["warm"]})
    assert engine.connector.layer.table.stats.blocks_adopted - adopted_before == 6

    while len(engine.recorder.complete) < 2:
        next(steps)
    assert sorted(map(len, engine.recorder.complete)) == [2, 4], "5'-6' and 9-12, without the leader"
    assert len(held) == 8
    assert not burst.tokens.keys() & prompts.keys(), "nobody runs on blocks that have not landed"

    tokens = {**finish(engine, warm, steps), **burst.tokens}
    tokens.pop("compute", None)
    fetched = [key for get in engine.recorder.complete for key in get]
    assert len(fetched) == len(set(fetched)) == 8 + 2 + 4
    counts = engine.recorder.take()
    assert (counts.gets, counts.addresses, counts.gpu_blocks) == (3, 1, 8 + 2 + 4 + 0)
    expect_equal(reference, prompts, tokens)


def test_a_chain_of_followers_adopts_from_several_flights(engine: Engine, reference: Arm, salt: int) -> None:
    """A leads 1-4, B adopts them and leads 5-8, C adopts from both and leads 9-12, D needs 1-12: three
    Gets for four requests, no block twice."""
    trunk = blocks(*range(1, 13), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {
        "a": [*trunk[: 4 * BLOCK], 7],
        "b": [*trunk[: 8 * BLOCK], 8],
        "c": [*trunk, 9],
        "d": [*trunk, 10],
    }
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, prompts)
    tokens = finish(engine, burst, steps)
    assert sorted(map(len, engine.recorder.complete)) == [4, 4, 4]
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys, counts.addresses, counts.gpu_blocks) == (3, 12, 1, 12)
    expect_equal(reference, prompts, tokens)


def test_a_longer_flight_that_lands_first_does_not_run_before_the_one_it_stands_on(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """B's own 5-8 are complete while A's 1-4 hang: B waits, and a newcomer for 1-8 loads nothing at all,
    since 5-8 stay pending until 1-4 have landed."""
    trunk = blocks(*range(1, 9), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {"a": [*trunk[: 4 * BLOCK], 7], "b": [*trunk, 8], "c": [*trunk, 9]}
    held: list[str] = []

    def first_only(keys: list[str]) -> bool:
        if not held:
            held.extend(keys)
        return held == keys

    engine.gate.concerns = first_only
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, {k: prompts[k] for k in "ab"})
    while not engine.connector.layer._complete_early:
        next(steps)
    assert len(engine.connector.layer.table) == 8
    assert not burst.tokens
    late, steps = until_scheduled(engine, {"c": prompts["c"]})
    tokens = {**finish(engine, late, steps), **burst.tokens}
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys) == (2, 8)
    expect_equal(reference, prompts, tokens)


def test_children_of_one_prompt_share_one_lookup_and_one_get(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard A6: n identical prompts, of which the store has the first four blocks of six. That the fifth
    is not there the leader's lookup has found out for all of them."""
    trunk = blocks(*range(1, 7), salt=salt)
    store_prefixes(engine, trunk[: 4 * BLOCK])
    prompts = {f"child-{i}": [*trunk, 7] for i in range(8)}
    burst = engine.burst(prompts, barrier=True)
    counts = engine.recorder.take()
    assert (counts.lookups, counts.load_specs, counts.gets, counts.keys, counts.gpu_blocks) == (1, 1, 1, 4, 4)
    expect_equal(reference, prompts, burst.tokens)


def test_a_prompt_of_whole_blocks_still_computes_its_last_token(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard H10: every block of the prompt is pending; the last one is not adopted, for computing the last
    token writes to it."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {"leader": [*trunk, 7], "whole": trunk, "again": trunk}
    stats = engine.connector.layer.table.stats
    before = stats.blocks_adopted
    burst = engine.burst(prompts, barrier=True)
    assert stats.blocks_adopted - before == 3 + 3
    assert engine.recorder.take().gets == 1
    expect_equal(reference, prompts, burst.tokens)


def test_sequential_requests_each_load_for_themselves(engine: Engine, salt: int) -> None:
    """Hazard A7: no accidental result cache. With the local cache emptied in between, two loads."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    for name in ("first", "second"):
        engine.burst({name: [*trunk, 7]})
        engine.cold()
    assert engine.recorder.take().gets == 2


def test_prompt_logprobs_never_attach_and_never_load(engine: Engine, reference: Arm, salt: int) -> None:
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {"leader": [*trunk, 7], "logprobs": [*trunk, 8]}
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, {"leader": prompts["leader"]})
    engine.add("logprobs", prompts["logprobs"], prompt_logprobs=1)
    while "logprobs" not in burst.tokens:
        next(steps)
    assert "leader" not in burst.tokens
    tokens = finish(engine, burst, steps)
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys) == (1, 4)
    expect_equal(reference, prompts, tokens)


def test_different_salts_never_share_a_flight(engine: Engine, salt: int) -> None:
    """Hazard I1: the same tokens under two cache salts are two loads into two addresses."""
    trunk = blocks(*range(1, 3), salt=salt)
    for who in ("x", "y"):
        engine.llm.add_request(f"fill-{who}", {"prompt_token_ids": [*trunk, 5], "cache_salt": who}, _greedy())
    engine.settle()
    engine.cold()
    engine.recorder.take()
    engine.gate.open.clear()
    for who in ("x", "y"):
        engine.llm.add_request(who, {"prompt_token_ids": [*trunk, 5], "cache_salt": who}, _greedy())
    while len(engine.recorder.waiting) < 2:
        engine.step()
    engine.gate.open.set()
    engine.settle()
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys, counts.gpu_blocks) == (2, 4, 4)


def _greedy() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
