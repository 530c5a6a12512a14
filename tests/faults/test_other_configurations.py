"""Configurations that attach mode supports besides the plain one.

Where vLLM reads a setting anew in every pass, a test sets it on the running engine instead of starting one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from connector_patch.lab.engine import Burst
from tests.faults.scripted_store import HANG_S, Fault, Get, scripted
from tests.support import blocks, expect_equal, finish, store_prefixes

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


@pytest.fixture
def lookup_async(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """kv_connector_extra_config.lookup_async: lookups are answered in a later pass. Gives the client."""
    monkeypatch.setattr(engine.connector.connector_scheduler, "lookup_async", True)
    return engine.connector.connector_scheduler.client


def test_asynchronous_lookups_of_a_burst_end_in_one_get(
    engine: Engine, reference: Arm, salt: int, lookup_async: Any
) -> None:
    """vllm-facts: "lookup_async=true: N, 1". All ask in the same pass, before any leads; in the next, the
    first answer makes a leader, the others attach, and their answers are dropped."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, 7 + i] for i in range(6)}
    burst = engine.burst(prompts, barrier=True)
    assert not lookup_async.futures
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys, counts.gpu_blocks) == (1, 4, 4)
    expect_equal(reference, prompts, burst.tokens)


def test_an_asynchronous_lookup_from_before_a_wait_is_not_believed_after_it(
    engine: Engine, reference: Arm, salt: int, policy: str, lookup_async: Any
) -> None:
    """Hazard A5; vllm-facts: "a lookup left over from before a wait can be stale". Four requests ask in one
    pass. One leads, three attach, and the store loses the objects while they wait. The leader's Get fails;
    its followers fall back and must ask the store anew: the old answer would send them to load what is gone,
    and under policy "fail" one of them would end in an error."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, 7 + i] for i in range(4)}
    store = engine.worker_connector.connector_worker.store
    lost = Fault(lambda get, keys, addresses, sizes: [])

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        lost.release.wait(HANG_S)
        store.remove_all(force=True)
        return get()

    lost.act = act
    with scripted(engine, lost):
        for name, prompt in prompts.items():
            engine.add(name, prompt)  # all before the first pass
        burst = Burst()
        steps = engine.collect(time.perf_counter(), burst)
        while len(engine.recorder.waiting) < len(prompts):
            next(steps)
        lost.release.set()
        tokens = finish(engine, burst, steps)
    assert engine.recorder.take().gets == 1
    failed = [name for name in prompts if not tokens[name]]
    assert len(failed) == (policy == "fail"), "the leader: whoever's answer came first"
    for name in failed:
        del prompts[name], tokens[name]
    expect_equal(reference, prompts, tokens)


def test_an_asynchronous_lookup_from_before_a_reset_is_not_believed_after_it(
    engine: Engine, reference: Arm, salt: int, lookup_async: Any
) -> None:
    """Hazard G1. A request has asked, the store is emptied, then the answer comes: it is about the old
    store."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    engine.add("asked", [*trunk, 7])
    engine.step()
    assert lookup_async.futures
    assert engine.scheduler.reset_connector_cache() is True
    tokens = engine.burst({}).tokens
    assert engine.recorder.take().gets == 0
    expect_equal(reference, {"asked": [*trunk, 7]}, tokens)


def test_a_consumer_that_stores_nothing(
    engine: Engine, reference: Arm, salt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kv_role kv_consumer: six requests of which each computes a tail of its own; one Get, and nothing new in
    the store."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    monkeypatch.setattr(engine.connector.connector_scheduler, "kv_role", "kv_consumer")
    prompts = {f"r{i}": [*trunk, *blocks(20 + i, salt=salt), 7] for i in range(6)}
    burst = engine.burst(prompts, barrier=True)
    engine.cold()
    assert engine.recorder.take().gets == 1
    expect_equal(reference, prompts, burst.tokens)
    engine.burst({"again": prompts["r1"]})
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys) == (1, 4), "the tail has not been stored"


@pytest.mark.parametrize("max_num_seqs", [1, 128])
def test_a_small_token_budget_and_few_sequences(
    engine: Engine, reference: Arm, salt: int, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int
) -> None:
    """vllm-facts: "small token budget, max_num_seqs=1: 6 Gets, 1 Get, same tokens". Tails of three blocks are
    prefilled in chunks of 48 tokens, one sequence at a time."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 48)
    monkeypatch.setattr(engine.scheduler, "max_num_active_reqs", max_num_seqs)
    prompts = {f"r{i}": [*trunk, *blocks(20 + i, 30 + i, 40 + i, salt=salt), 7] for i in range(6)}
    burst = engine.burst(prompts, barrier=True)
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys, counts.gpu_blocks) == (1, 4, 4)
    expect_equal(reference, prompts, burst.tokens)


def test_the_samples_of_one_prompt_share_its_load(engine: Engine, reference: Arm, salt: int) -> None:
    """`n` 3: vLLM makes a request of each sample. At this temperature each says what greedy decoding does."""
    from vllm import SamplingParams

    prompt = [*blocks(*range(1, 5), salt=salt), 7]
    store_prefixes(engine, prompt[:-1])
    nearly_greedy = SamplingParams(n=3, temperature=1e-3, max_tokens=4, ignore_eos=True)
    engine.llm.add_request("samples", {"prompt_token_ids": prompt}, nearly_greedy)
    said: dict[str, list[int]] = {}
    while engine.llm.has_unfinished_requests():
        for output in engine.step():
            said.update((str(sample.index), list(sample.token_ids)) for sample in output.outputs)
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys, counts.gpu_blocks) == (1, 4, 4)
    expect_equal(reference, dict.fromkeys(("0", "1", "2"), prompt), said)
