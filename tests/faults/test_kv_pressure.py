"""A pool that is nearly full: parked loads, shared blocks, preemption, eviction between two passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.checksums import guard
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
