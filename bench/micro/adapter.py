"""What the layer costs the scheduler, call by call, beside the stock connector.

    python -m pytest bench/micro/adapter.py --benchmark-json=bench/results/adapter.json

A real engine's connector, cache manager and requests; only the store's lookup is answered at once ("not
there"), since its round trip of some 100 us would hide everything. "stock" is the same connector object with
the layer taken out. Targets: an empty table costs at most 2 us over stock; an idle scheduler step at most
10 us over stock; with 64 flights, or with a prompt of 1,000 blocks, a call takes at most 50 us at the 99th
percentile; "chooses", ours with a choice between loading and computing where loading is always right, costs
at most 2 us a lookup over ours. `-k "pending or idle or store_has"` runs what these are about.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

BLOCK = 32
ROUNDS = 5_000
names = itertools.count()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from singleflight.stack.embedded import Stack

    with Stack() as stack:
        os.environ.update(stack.env(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_MOONCAKE_LOAD_RECV_THREADS="4"))
        from connector_patch.lab.engine import Engine
        from connector_patch.plugin import NAME

        module = {"kv_connector_module_path": "connector_patch.connector"}
        running = Engine(str(stack.model), NAME, kv_transfer=module)
        miss = SimpleNamespace(hit_length=0, tail_key_boundaries=())
        running.connector.connector_scheduler.client.lookup = lambda *args, **kwargs: miss
        yield running
        running.close()


@pytest.fixture(params=["stock", "ours"])
def connector(engine: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The connector as it is, or with the layer taken out; nothing in the table before and after."""
    layer = engine.connector.layer
    clock, layer._clock = layer._clock, lambda: 1.0  # all flights have just begun
    deltas = engine.connector._deltas
    if request.param == "stock":
        engine.connector.layer = engine.connector._deltas = None
    if request.param == "chooses":
        layer.chooser = chooser()
    gc.collect()
    gc.disable()
    yield engine.connector
    gc.enable()
    engine.connector.layer, engine.connector._deltas = layer, deltas
    layer._clock, layer.chooser = clock, None
    for flight in list(layer.table._flights.values()):
        layer.table.fail(flight.generation)
    layer._plans.clear()


def chooser() -> Any:
    """Knows that a block is loaded in 0.1 ms, and computed in 3."""
    from connector_patch.choice import Chooser
    from singleflight.core.policy import Policy
    from singleflight.core.prefill import Work

    made = Chooser(Policy(), BLOCK, lanes=4, budget=8192)
    for number in range(1, 20):
        made.queue.add("load", 10 * number, 0.0)
        made.queue.add("next", 1, 0.0)  # so that the link is known to have been busy
        made.queue.reported([], 0.0)
        made.queue.reported(["load"], 1e-3 * number)
        made.queue.reported(["next"], 1e-3 * number + 1e-4)
        work = Work.of(0, 256 * number)
        made.steps.speed.observe(work, 0, 1e-4 * work.tokens + 1e-8 * work.pairs)
    assert made.queue.load_s(128, 0.0) is not None
    assert made.steps.speed.seconds(Work.of(0, 4096)) is not None
    return made


def prompt(engine: Any, blocks: int, salt: int) -> Any:
    """A request of so many full blocks and one token, which is no other request's prefix."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    tokens = [3 + (911 * salt + 7 * i) % 2040 for i in range(blocks * BLOCK + 1)]
    hasher = engine.core.request_block_hasher
    return Request(f"r{next(names)}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def lead(engine: Any, hashes: list[Any], flights: int = 1) -> None:
    """Have these blocks in the air, in so many flights."""
    table = engine.connector.layer.table if engine.connector.layer else None
    size = -(-len(hashes) // flights)
    for first in range(0, len(hashes), size):
        part = hashes[first : first + size]
        if table is not None:
            assert table.lead(f"leader-{next(names)}", part, part, 0.0) is not None


def others(engine: Any, flights: int = 64) -> None:
    """64 flights of 16 blocks of no request that is asked about."""
    lead(engine, [f"other-{i}" for i in range(16 * flights)], flights)


def timed(benchmark: Any, call: Callable[..., Any], **more: Any) -> Any:
    return benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=100, **more)


@pytest.mark.parametrize("connector", ["stock", "ours", "chooses"], indirect=True)
def test_lookup_of_what_the_store_has(benchmark: Any, engine: Any, connector: Any) -> None:
    """128 blocks that nobody loads."""
    request = prompt(engine, 128, salt=4)
    stock, chooser = connector.connector_scheduler, getattr(connector.layer, "chooser", None)
    miss, hit = stock.client.lookup, SimpleNamespace(hit_length=128 * BLOCK, tail_key_boundaries=())
    stock.client.lookup = lambda *args, **kwargs: hit

    def forget(*_: Any) -> None:
        stock.load_specs.pop(request.request_id, None)
        if chooser is not None:
            chooser.finished(request.request_id)

    try:
        found = timed(
            benchmark, connector.get_num_new_matched_tokens, setup=lambda: ((request, 0), {}), teardown=forget
        )
    finally:
        stock.client.lookup = miss
    assert found == (128 * BLOCK, True)


@pytest.mark.parametrize("blocks", [32, 1000])
@pytest.mark.parametrize("flights", [0, 64])
def test_lookup_of_what_nobody_loads(
    benchmark: Any, engine: Any, connector: Any, flights: int, blocks: int
) -> None:
    request = prompt(engine, blocks, salt=1)
    others(engine, flights) if flights else None
    assert timed(benchmark, connector.get_num_new_matched_tokens, args=(request, 0)) == (0, False)


@pytest.mark.parametrize("flights", [1, 64])
def test_lookup_of_1000_pending_blocks_in_so_many_flights(
    benchmark: Any, engine: Any, connector: Any, flights: int
) -> None:
    """With `flights` = 1, beside 64 others. A second request with equal hashes, not the same objects."""
    lead(engine, prompt(engine, 1000, salt=2).block_hashes, flights)
    others(engine) if flights == 1 else None
    request = prompt(engine, 1000, salt=2)
    expected = (0, False) if connector.layer is None else (1000 * BLOCK, True)
    assert timed(benchmark, connector.get_num_new_matched_tokens, args=(request, 0)) == expected


@pytest.mark.parametrize("flights", [0, 64])
def test_idle_scheduler_step(benchmark: Any, engine: Any, connector: Any, flights: int) -> None:
    """All that vLLM calls in a step in which nothing has happened."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    others(engine, flights) if flights else None
    output = KVConnectorOutput()

    def step() -> None:
        connector.build_connector_meta(SchedulerOutput.make_empty())
        connector.update_connector_output(output)
        connector.get_kv_connector_stats()

    timed(benchmark, step)


def test_landing_of_a_flight_of_128_blocks_with_31_followers(benchmark: Any, engine: Any) -> None:
    """Publish 128 blocks and let 31 requests go; the stock connector reports 32 loads instead."""
    from vllm.v1.outputs import KVConnectorOutput

    connector, manager = engine.connector, engine.scheduler.kv_cache_manager
    stock = connector.connector_scheduler
    hit = SimpleNamespace(hit_length=128 * BLOCK, tail_key_boundaries=())
    miss, stock.client.lookup = stock.client.lookup, lambda *args, **kwargs: hit
    requests = [prompt(engine, 128, salt=3) for _ in range(32)]

    def admit() -> Any:
        for request in requests:
            local, count, *_ = manager.get_computed_blocks(request)
            assert count == 0
            external, is_async = connector.get_num_new_matched_tokens(request, 0)
            assert (external, is_async) == (128 * BLOCK, True)
            assert manager.allocate_slots(
                request,
                0,
                num_new_computed_tokens=0,
                new_computed_blocks=local,
                num_external_computed_tokens=external,
                delay_cache_blocks=True,
                skip_zeroing_group_ids=connector.get_loaded_kv_cache_group_ids(request),
            )
            held = manager.get_blocks(request.request_id)
            connector.update_state_after_alloc(request, held, external)
            request.num_computed_tokens = external
        return (KVConnectorOutput(finished_recving={requests[0].request_id}),), {}

    def forget(output: Any) -> None:
        assert output.finished_recving == {request.request_id for request in requests}
        for request in requests:
            manager.free(request)
            stock.load_specs.pop(request.request_id, None)
            request.num_computed_tokens = 0
        assert manager.reset_prefix_cache()

    try:
        benchmark.pedantic(
            connector.update_connector_output, setup=admit, teardown=forget, rounds=300, warmup_rounds=0
        )
    finally:
        stock.client.lookup = miss
