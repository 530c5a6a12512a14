"""What tests on a real engine share: prompts, a cold store-backed start, and the quiescence check."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from connector_patch.health import Health
from connector_patch.lab.engine import Burst
from singleflight.core.estimate import LoadTimes

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

BLOCK = 32
STUCK_S = 60.0
"""After this long without what a test waits for, it fails instead of hanging."""
salts = itertools.count(3)
"""One for each test, so that none meets another's blocks in the store."""


class Clock:
    """Monotonic seconds that move when told to: the first step that needs a torch.compile kernel takes longer
    on a fresh machine than any deadline."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def blocks(*names: int, salt: int) -> list[int]:
    """Whole blocks of tokens, told apart by name and salt."""
    return [3 + (37 * name + 911 * salt + 13 * i) % 2040 for name in names for i in range(BLOCK)]


def store_prefixes(engine: Engine, *prompts: Sequence[int]) -> None:
    """Have these prefixes in the store and nowhere else."""
    engine.fill([*prompt, 5] for prompt in prompts)
    engine.recorder.take()


def until_scheduled(engine: Engine, prompts: Mapping[str, Sequence[int]]) -> tuple[Burst, Iterator[None]]:
    """Add requests one by one and step until each has been through the scheduler.

    Returns what the requests' results go into, and the steps that remain.
    """
    burst = Burst()
    steps: Iterator[None] = iter(())
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt)
        steps = engine.collect(time.perf_counter(), burst)
        while not any(w.startswith(f"{request_id}-") or w == request_id for w in engine.recorder.waiting):
            next(steps)
    return burst, steps


def finish(engine: Engine, burst: Burst, steps: Iterator[None]) -> dict[str, list[int]]:
    """Open the barrier and run to the end; the tokens of every request."""
    engine.gate.open.set()
    limit = time.monotonic() + STUCK_S
    for _ in steps:
        assert time.monotonic() < limit, f"stuck: {engine.connector.layer.table!r}"
    return burst.tokens


def expect_equal(reference: Arm, prompts: Mapping[str, Sequence[int]], tokens: dict[str, list[int]]) -> None:
    """Token for token what vLLM generates without any connector."""
    plain = reference.ask("burst", prompts={k: list(v) for k, v in prompts.items()})
    assert tokens == plain["tokens"]


@contextlib.contextmanager
def quiescent(engine: Engine) -> Iterator[Engine]:
    """The engine, cold before the block; after it, nothing may be left of what happened in it.

    Inside, the adapter's clock stands still until the test moves it.
    """
    engine.cold()
    engine.connector.layer._clock = Clock()
    # What other tests' loads took, and which of them failed, says nothing here.
    table = engine.connector.layer.table
    table.forecast.times = LoadTimes()
    engine.connector.layer.health = Health(table.policy, table.stats)
    baseline = engine.free_blocks()
    engine.recorder.take()
    yield engine
    engine.gate.open.set()
    engine.gate.concerns = lambda keys: True
    engine.cold()  # raises where a request is stuck or a block is lost
    layer = engine.connector.layer
    for holder in (layer, layer.table):
        assert not {name: v for name, v in vars(holder).items() if isinstance(v, dict | set) and v}
    assert engine.free_blocks() == baseline
    worker = engine.worker_connector.connector_worker
    assert all(thread.is_alive() for thread in worker.kv_recv_threads)
    assert worker.recv_request_queue.empty()
