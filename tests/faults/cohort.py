"""Requests driven step by step: who is scheduled, who is aborted, and when, is the test's to say."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from singleflight.core.stats import Reason
from tests.support import STUCK_S, expect_equal

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.core.flight import Flight
    from singleflight.core.table import PendingBlockTable
    from singleflight.stack.arms import Arm


class Cohort:
    """Requests on one engine, by the names that the test gives them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.finished: Counter[str] = Counter()
        self._aborted: set[str] = set()
        self._fell_back = Counter(self.table.stats.fell_back)

    # -- what happens ------------------------------------------------------------------------------------

    def add(self, **prompts: Sequence[int]) -> None:
        for name, prompt in prompts.items():
            self.prompts[name] = list(prompt)
            self.engine.add(name, prompt)

    def arrive(self, **prompts: Sequence[int]) -> None:
        """One after the other: each waits for tokens from outside before the next one comes."""
        for name, prompt in prompts.items():
            self.add(**{name: prompt})
            self.until(partial(self._waits, name))

    def _waits(self, name: str) -> bool:
        return self.id(name) in self.engine.recorder.waiting

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                if output.finished:
                    self.finished[output.request_id] += 1
                    self.tokens[output.request_id] = list(output.outputs[0].token_ids)

    def until(self, condition: Callable[[], object]) -> int:
        """Step until it holds; how many steps that took. AssertionError where it takes too long."""
        limit, steps = time.monotonic() + STUCK_S, 0
        while not condition():
            self.step()
            steps += 1
            assert time.monotonic() < limit, f"stuck: {self.table!r}"
        return steps

    def abort(self, *names: str) -> None:
        self._aborted.update(names)
        self.engine.llm.abort_request(list(names))

    def finish(self, *names: str) -> None:
        """Run to the end: these requests, or all; each must end exactly once."""
        wanted = names or tuple(self.prompts.keys() - self._aborted)
        self.until(lambda: self.finished.keys() >= set(wanted))
        assert all(self.finished[name] == 1 for name in wanted)

    # -- what there is to see ----------------------------------------------------------------------------

    @property
    def table(self) -> PendingBlockTable:
        table: PendingBlockTable = self.engine.connector.layer.table
        return table

    def id(self, name: str) -> str | None:
        """The name inside the engine, which has a suffix; None if the engine does not know it any more."""
        return next((r for r in self.engine.scheduler.requests if r.rpartition("-")[0] == name), None)

    def request(self, name: str) -> Any:
        return self.engine.scheduler.requests[self.id(name)]

    def running(self, name: str) -> bool:
        """vLLM computes it, or has done so."""
        request_id = self.id(name)
        return self.finished[name] > 0 or any(
            r.request_id == request_id for r in self.engine.scheduler.running
        )

    def waiting_for_the_store(self, name: str) -> bool:
        """vLLM waits for its KV: its own load, or the load that it follows."""
        return str(self.request(name).status.name) == "WAITING_FOR_REMOTE_KVS"

    def blocks(self, name: str) -> set[int]:
        """The GPU blocks it holds."""
        manager = self.engine.scheduler.kv_cache_manager
        return {block.block_id for block in manager.get_blocks(self.id(name)).blocks[0]}

    def flight(self, leader: str) -> Flight:
        return next(f for f in self.table._flights.values() if str(f.leader).rpartition("-")[0] == leader)

    def fell_back(self) -> dict[Reason, int]:
        """Followers that have fallen back in this test, by reason."""
        now = Counter(self.table.stats.fell_back)
        now.subtract(self._fell_back)
        return {reason: count for reason, count in now.items() if count}

    def expect_equal(self, reference: Arm, *failed: str) -> None:
        """Everybody has vLLM's own tokens, but whom vLLM's policy was to fail: those have none."""
        for name in failed:
            assert self.tokens[name] == [], f"{name} meets vLLM's policy"
        good = {n: p for n, p in self.prompts.items() if n not in self._aborted and n not in failed}
        expect_equal(reference, good, {name: self.tokens[name] for name in good})

    @contextlib.contextmanager
    def free(self, count: int) -> Iterator[Callable[[], None]]:
        """Only so many GPU blocks are free, until the end of the block or a call of what it gives."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(pool.get_num_free_blocks() - count)

        def give_back() -> None:
            pool.free_blocks(held)
            held.clear()

        try:
            yield give_back
        finally:
            give_back()


def tailed(trunk: Sequence[int], *names: str) -> dict[str, list[int]]:
    """One prompt for each name: the trunk, and four tokens of its own."""
    return {name: [*trunk, *(7 + i for _ in range(4))] for i, name in enumerate(names)}
