"""After each test on the shared engine nothing is left of it: no request, no block, nothing in LMCache's
hands."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from connector_patch.health import Health
from connector_patch.lab.lmcache_bed import lmcache_of
from singleflight.core.estimate import LoadTimes
from tests.support import STUCK_S, Clock

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine


def in_the_server_only(engine: Engine, prompts: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Have the whole chunks of these prompts in the server and nowhere else.

    Returns each prompt's tokens: what vLLM makes of it when nothing has been stored yet.
    """
    computed = engine.burst(prompts).tokens
    engine.fill(prompts.values())
    engine.recorder.take()
    return computed


def healthy(engine: Engine) -> bool:
    """Whether both sides of LMCache believe in their server."""
    scheduler, worker = lmcache_of(engine.connector), lmcache_of(engine.worker_connector)
    assert scheduler is not None
    assert worker is not None
    return scheduler.scheduler_adapter.is_healthy and worker.worker_adapter.is_healthy


@contextlib.contextmanager
def quiescent(engine: Engine) -> Iterator[Engine]:
    """The engine, cold before the block, with the adapter's clock standing still; checked after it."""
    layer = engine.connector.layer
    engine.cold()
    layer._clock = Clock()
    layer.table.forecast.times = LoadTimes()
    layer.health = Health(layer.table.policy, layer.table.stats)
    baseline = engine.free_blocks()
    engine.recorder.take()
    yield engine
    engine.gate.open.set()
    engine.gate.concerns = lambda keys: True
    limit = time.monotonic() + STUCK_S
    while not healthy(engine):
        assert time.monotonic() < limit, "LMCache has not found its server again"
        time.sleep(0.05)
    engine.cold()  # raises where a request is stuck or a block is lost
    assert engine.free_blocks() == baseline
    scheduler, worker = lmcache_of(engine.connector), lmcache_of(engine.worker_connector)
    assert scheduler is not None
    assert worker is not None
    assert not scheduler.request_trackers
    assert not scheduler.scheduler_adapter._pending_lookups
    assert not worker.worker_adapter.retrieve_futures
    assert not worker.worker_adapter.store_futures
    for holder in (layer, layer.table, layer._store):
        assert not {name: v for name, v in vars(holder).items() if isinstance(v, dict | set) and v}
