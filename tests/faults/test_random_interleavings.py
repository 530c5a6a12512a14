"""Any order of arrivals, aborts, faults, releases, deadlines, squeezes and resets, on the real engine.

Hypothesis draws a schedule; each step of it acts and then lets the engine make a step or two. Time is the
adapter's own clock, moved by the schedule, so that a deadline passes exactly when the schedule says. At the
end all is released and run to the end, and nothing may be wrong, lost or left over. A failing schedule is
shrunk and printed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector_patch.lab import memory
from tests.faults.checksums import Guard, guard
from tests.faults.scripted_store import Fault, Get, fail_keys, hang, raise_, scripted, short_read
from tests.support import STUCK_S, blocks, quiescent, salts

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine

NAMES = {
    "1-4": (1, 2, 3, 4),
    "1-8": (1, 2, 3, 4, 5, 6, 7, 8),
    "1-2": (1, 2),
    "1-2 and a branch": (1, 2, 23, 24, 25),
    "another": (31, 32, 33),
}
POOL = 24


def rubbish() -> Fault:
    """No key is loaded, and something else is written where they should be."""

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        for parts, lengths in zip(addresses, sizes, strict=True):
            for address, size in zip(parts, lengths, strict=True):
                memory.fill(address, 0x3C, size)
        return [-704] * len(keys)

    return Fault(act)


FAULTS: dict[str, Callable[[], Fault]] = {
    "hang": hang,
    "all keys": fail_keys,
    "a key": lambda: fail_keys(1),
    "exception": lambda: raise_(RuntimeError("the wire is cut")),
    "short read": short_read,
    "rubbish": lambda: rubbish(),
}

arrive = st.tuples(st.just("arrive"), st.sampled_from(sorted(NAMES)), st.integers(1, 3), st.integers(1, 4))
events = st.one_of(
    arrive,
    arrive,
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("fault"), st.sampled_from(sorted(FAULTS))),
    st.tuples(st.just("fault"), st.sampled_from(sorted(FAULTS))),
    st.tuples(st.just("release"), st.integers(0, 3)),
    st.tuples(st.just("time"), st.sampled_from([1.0, 6.0, 60.0])),
    st.tuples(st.just("squeeze"), st.integers(0, POOL)),
    st.tuples(st.just("forget"), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


@pytest.fixture(scope="module")
def known(ours: Engine, reference: Arm) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The prompts, all in the store, and what they generate without a connector."""
    salt = next(salts)
    prompts = {name: [*blocks(*names, salt=salt), 7] for name, names in NAMES.items()}
    ours.fill(prompts.values())
    return prompts, reference.ask("burst", prompts=prompts, max_tokens=3)["tokens"]


class Run:
    """One schedule on the engine."""

    number = itertools.count()

    def __init__(self, engine: Engine, store: Any, watching: Guard, prompts: dict[str, list[int]]) -> None:
        self.engine, self.store, self.watching, self.prompts = engine, store, watching, prompts
        self.pool = engine.scheduler.kv_cache_manager.block_pool
        self.live: dict[str, tuple[str, int]] = {}
        self.ended: dict[str, tuple[str, int, Any]] = {}
        self.held: list[Any] = []
        self.now = 0.0

    def do(self, kind: str, *what: Any) -> None:
        getattr(self, kind)(*what)
        self.step(1)
        self.watching.check()

    def arrive(self, name: str, tokens: int, together: int) -> None:
        for _ in range(together):
            request_id = f"h{next(self.number)}"
            self.live[request_id] = name, tokens
            self.engine.add(request_id, self.prompts[name], tokens)

    def abort(self, index: int) -> None:
        if self.live:
            request_id = list(self.live)[index % len(self.live)]
            del self.live[request_id]
            self.engine.llm.abort_request([request_id])

    def fault(self, kind: str) -> None:
        self.store.faults.append(FAULTS[kind]())

    def release(self, index: int) -> None:
        waiting = [f for f in self.store.faults if f.reached.is_set() and not f.release.is_set()]
        if waiting:
            waiting[index % len(waiting)].release.set()

    def time(self, seconds: float) -> None:
        self.now += seconds

    def squeeze(self, count: int) -> None:
        difference = self.pool.get_num_free_blocks() - count
        if difference > 0:
            self.held.extend(self.pool.get_new_blocks(difference))
        elif difference < 0 and self.held:
            give, self.held = self.held[difference:], self.held[:difference]
            self.pool.free_blocks(give)

    def forget(self, running: bool) -> None:
        """Reset the prefix cache, or also preempt all that run; vLLM refuses while loads hold blocks."""
        try:
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError:
            assert running
        self.engine.connector.layer.reset()

    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step():
                if output.finished:
                    assert output.request_id not in self.ended, "finished twice"
                    self.ended[output.request_id] = (*self.live.pop(output.request_id), output.outputs[0])

    def to_the_end(self) -> None:
        for fault in self.store.faults:
            fault.times = 0
            fault.release.set()
        self.pool.free_blocks(self.held)
        self.held = []
        limit = time.monotonic() + STUCK_S  # not so many steps: on a busy machine a Get outlasts thousands
        while self.live:
            self.step(1)
            assert time.monotonic() < limit, f"stuck: {self.live} {self.engine.connector.layer.table!r}"


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedule=st.lists(events, min_size=4, max_size=24), recompute=st.booleans())
@pytest.mark.timeout(400)
def test_any_schedule_ends_with_the_right_tokens_and_nothing_left(
    ours: Engine,
    known: tuple[dict[str, list[int]], dict[str, list[int]]],
    schedule: list[tuple[Any, ...]],
    recompute: bool,
) -> None:
    """Hazards D1-D6, E1-E7, F1-F6, G2, G5, H2, H4 in any order: see the module."""
    prompts, expected = known
    attach, scheduler = ours.connector.layer, ours.scheduler
    clock, before = attach._clock, scheduler.recompute_kv_load_failures
    scheduler.recompute_kv_load_failures = recompute
    try:
        with quiescent(ours), scripted(ours) as store, guard(ours) as watching:
            run = Run(ours, store, watching, prompts)
            attach._clock = lambda: run.now
            all_blocks = run.pool.get_num_free_blocks()
            outside = run.pool.get_new_blocks(all_blocks - POOL)
            try:
                for event in schedule:
                    run.do(*event)
            finally:
                try:
                    run.to_the_end()
                finally:
                    run.pool.free_blocks(outside)
    finally:
        attach._clock, scheduler.recompute_kv_load_failures = clock, before
    for name, tokens, answer in run.ended.values():
        if answer.finish_reason == "error":
            assert not recompute
        else:
            assert list(answer.token_ids) == expected[name][:tokens]
