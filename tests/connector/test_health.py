"""The rules with a store that is ill, without an engine: the store and the clock are the test's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from connector_patch import health
from connector_patch.config import Config, OnDeadline
from connector_patch.park import ParkScheduler
from connector_patch.rules import ASK_AGAIN, NOTHING, TICK
from connector_patch.store import Answer
from singleflight.core.policy import Policy
from singleflight.core.stats import Reason
from tests.support import Clock

SIZE = 16
HASHES = [bytes([name]) for name in range(8)]


class FakeStore:
    """A `store.Store` that has the first eight blocks of everybody's prompt."""

    block_size = SIZE
    parallel_loads = 1
    drops_last = asked_first = loads_once = False

    def __init__(self) -> None:
        self.planned: dict[str, range] = {}
        self.lookups = 0

    def ask(self, request: Any, num_local_tokens: int, pending: int = 0) -> Answer:
        self.lookups += 1
        first, end = num_local_tokens // SIZE, len(HASHES)
        if first >= end:
            return NOTHING
        self.planned[request.request_id] = range(first, end)
        return (end - first) * SIZE, True

    def alone(self, request: Any, num_local_tokens: int, answer: Answer) -> Answer:
        return answer

    def narrow(self, request_id: str, first_token: int, own_tokens: int) -> int:
        self.planned[request_id] = range(first_token // SIZE, self.planned[request_id].stop)
        return own_tokens

    def cut(self, request_id: str, end_token: int) -> None:
        self.planned[request_id] = range(self.planned[request_id].start, end_token // SIZE)

    def withdraw(self, request_id: str) -> None:
        self.planned.pop(request_id, None)

    def withdraw_answers(self) -> None: ...

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> range | None:
        load = self.planned.pop(request.request_id, None)
        assert num_external_tokens == (len(load) * SIZE if load is not None else 0)
        return load

    def there(self, out: Any) -> dict[str, int]:
        return {}

    def broken(self, out: Any) -> dict[str, int]:
        return dict(out.broken)


class Engine:
    """vLLM's part, for requests of one prompt: ask, allocate, report."""

    def __init__(self, **config: Any) -> None:
        self.store, self.clock = FakeStore(), Clock()
        self.tokens = len(HASHES) * SIZE + 1
        self.rules = ParkScheduler(cast(Any, self.store), Config(**config), self.clock)

    def request(self, name: str) -> Any:
        return SimpleNamespace(
            request_id=name,
            block_hashes=HASHES,
            num_tokens=self.tokens,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
        )

    def ask(self, name: str, local_blocks: int = 0) -> Any:
        return self.rules.match(self.request(name), local_blocks * SIZE)

    def admit(self, name: str, local_blocks: int = 0) -> int:
        """Ask, and have it allocated; the blocks that it loads."""
        tokens, _ = self.ask(name, local_blocks)
        assert tokens is not None
        self.rules.allocated(self.request(name), cast(Any, None), tokens)
        return int(tokens // SIZE)

    def report(self, *done: str, failed: str = "", broken: int | None = None) -> None:
        """One step's end: what the worker was asked for, and what has ended; of what failed, the block."""
        asked = self.rules.acknowledgements()
        out = SimpleNamespace(
            finished_recving={*done, *asked},
            failed_recving={failed} - {""},
            broken={failed: broken} if broken is not None else {},
        )
        self.rules.output(cast(Any, out))
        assert TICK not in out.finished_recving

    def fell_back(self) -> dict[Reason, int]:
        return dict(self.rules.table.stats.fell_back)


class TestBrokenKeys:
    @pytest.mark.parametrize("bad", range(8))
    @pytest.mark.parametrize("local", [0, 3])
    def test_a_request_loads_only_up_to_the_broken_block(self, bad: int, local: int) -> None:
        """Whatever the place of the block, and of the local hit; nothing is computed that could be loaded."""
        engine = Engine()
        engine.rules.health.unreadable(HASHES[bad], engine.clock())
        assert engine.admit("a", local) == (bad - local if bad >= local else 8 - local)

    def test_if_the_first_block_is_broken_the_store_is_not_even_asked(self) -> None:
        engine = Engine()
        engine.rules.health.unreadable(HASHES[0], engine.clock())
        assert engine.ask("a") == NOTHING
        assert engine.store.lookups == 0

    def test_a_block_that_a_load_could_not_read_is_known_to_be_broken_for_its_time(self) -> None:
        engine = Engine(policy=Policy(broken_ttl_s=30.0))
        assert engine.admit("a", 2) == 6
        engine.report("a", failed="a", broken=3)
        for i in range(5):
            assert engine.admit(f"b{i}", 2) == 3
            engine.report(f"b{i}")
        engine.clock.advance(30.0)
        assert engine.admit("c", 2) == 6
        assert engine.rules.table.stats.blocks_broken == 1

    def test_of_a_load_that_failed_without_a_word_no_block_is_known_to_be_broken(self) -> None:
        engine = Engine()
        assert engine.admit("a") == 8
        engine.report("a", failed="a")
        assert engine.admit("b") == 8

    def test_nobody_waits_for_a_block_that_is_known_to_be_broken(self) -> None:
        """The leader's failure is reported a step before the end of its load. A newcomer waits for what is
        before the block, and if it is the first, for nothing."""
        for broken, answer in ((3, ASK_AGAIN), (0, NOTHING)):
            engine = Engine()
            engine.admit("leader")
            engine.rules.health.unreadable(HASHES[broken], engine.clock())
            assert engine.ask("newcomer") == answer
            assert engine.store.lookups == 1, "the leader's"

    def test_the_one_retry_of_a_cohort_loads_all_of_it(self) -> None:
        """It may have been that load and not the block: then nobody need compute it."""
        engine = Engine()
        engine.admit("leader")
        assert engine.ask("follower") == ASK_AGAIN
        engine.report("leader", failed="leader", broken=3)
        assert engine.admit("newcomer") == 3
        engine.rules.finished("newcomer", aborted=True)
        engine.report("newcomer")
        assert engine.admit("follower") == 8
        engine.report("follower")
        assert engine.admit("another") == 8

    def test_a_load_that_lands_clears_its_blocks(self) -> None:
        engine = Engine()
        assert engine.admit("a") == 8
        engine.rules.health.unreadable(HASHES[2], engine.clock())
        engine.report("a")
        assert engine.admit("b") == 8

    def test_a_reset_clears_all(self) -> None:
        engine = Engine()
        engine.rules.health.unreadable(HASHES[2], engine.clock())
        engine.rules.reset()
        assert engine.admit("a") == 8


class TestBreaker:
    def opened(self, **config: Any) -> Engine:
        engine = Engine(policy=Policy(breaker_failures=2, breaker_pause_s=5), **config)
        for name in ("x", "y"):
            engine.admit(name)
            engine.report(name, failed=name)
        return engine

    def test_after_failures_in_a_row_nobody_waits_and_whoever_would_have_computes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        for level in ("warning", "info"):
            monkeypatch.setattr(health.logger, level, lambda text, level=level: said.append(level))
        engine = self.opened()
        assert engine.rules.table.stats.breaker_open == 1
        assert engine.admit("leader") == 8
        for i in range(3):
            assert engine.ask(f"f{i}") == NOTHING
        engine.clock.advance(5)
        assert engine.ask("later") == ASK_AGAIN, "half-open: on trial"
        assert engine.rules.table.stats.breaker_open == 0
        engine.report("leader")
        assert said == ["warning", "info"], "one line for each change"

    def test_with_on_deadline_load_it_loads_for_itself(self) -> None:
        engine = self.opened(on_deadline=OnDeadline.LOAD)
        assert engine.admit("leader") == 8
        assert engine.admit("other") == 8

    def test_loads_that_are_overdue_open_it_too(self) -> None:
        """Two loads hang, one after the other; the first lands late, which proves nothing."""
        engine = Engine(policy=Policy(breaker_failures=2))
        engine.admit("x")
        engine.clock.advance(1000)
        engine.report()
        engine.report("x")
        engine.admit("y")
        engine.clock.advance(1000)
        engine.report()
        assert engine.rules.table.stats.breaker_open == 1


class TestOneDeadlineARequest:
    def test_whoever_has_waited_and_finds_nothing_waits_on_and_not_anew(self) -> None:
        """Each time that what it waited for has landed it is evicted before the follower is admitted, and the
        next leader loads it again. Eight blocks of 16 tokens: 10.4 s, once."""
        engine = Engine()
        deadline = engine.clock() + 10.4
        waits = 0
        for i in range(8):
            engine.admit(f"leader{i}")
            waits += engine.ask("follower") == ASK_AGAIN
            engine.clock.advance(3.0)
            engine.report(f"leader{i}")
        assert waits == 4, "at 0, 3, 6 and 9 seconds"
        assert engine.clock() > deadline
        assert engine.admit("follower") == 8
        assert engine.fell_back() == {}, "each of its waits has ended well"

    def test_the_deadline_falls_due_in_a_later_wait(self) -> None:
        engine = Engine()
        for i in range(2):
            engine.admit(f"leader{i}")
            assert engine.ask("follower") == ASK_AGAIN
            engine.clock.advance(6.0)
            engine.report(*([f"leader{i}"] if i == 0 else []))
        assert engine.fell_back() == {Reason.DEADLINE: 1}

    def test_who_has_been_admitted_begins_again(self) -> None:
        """It is preempted, long afterwards: that is another wait."""
        engine = Engine()
        engine.admit("leader")
        assert engine.ask("follower") == ASK_AGAIN
        engine.report("leader")
        engine.admit("follower", 8)
        engine.clock.advance(1000)
        engine.admit("another")
        assert engine.ask("follower") == ASK_AGAIN


class TestDeadlinesThatLearn:
    @pytest.mark.parametrize(("failed", "patience_s"), [(False, 24.0), (True, 10.4)])
    def test_from_a_load_that_landed_and_from_no_other(self, failed: bool, patience_s: float) -> None:
        """A load takes eight seconds; with a factor of three, whoever waits next waits up to 24."""
        engine = Engine(policy=Policy(deadline_learned_factor=3.0))
        engine.admit("slow")
        engine.clock.advance(8.0)
        engine.report("slow", failed="slow" if failed else "")
        engine.admit("leader")
        assert engine.ask("follower") == ASK_AGAIN
        engine.clock.advance(patience_s - 0.1)
        engine.report()
        assert engine.fell_back() == {}
        engine.clock.advance(0.2)
        engine.report()
        assert engine.fell_back() == {Reason.DEADLINE: 1}


class TestReportsBeforeTheClock:
    def test_what_has_landed_in_a_pause_has_landed(self) -> None:
        """The engine makes no step for longer than the deadline; in the first one after it the worker reports
        the load."""
        engine = Engine()
        engine.admit("leader")
        assert engine.ask("follower") == ASK_AGAIN
        engine.clock.advance(1000)
        assert engine.ask("follower") == ASK_AGAIN
        engine.report("leader")
        assert engine.fell_back() == {}
        assert engine.rules.table.stats.ready == 1

    def test_what_has_not_landed_by_then_is_late_in_that_very_step(self) -> None:
        engine = Engine()
        engine.admit("leader")
        assert engine.ask("follower") == ASK_AGAIN
        engine.clock.advance(1000)
        engine.report()
        assert engine.fell_back() == {Reason.DEADLINE: 1}


@pytest.mark.parametrize("tail", [1, 0], ids=["and a token", "whole blocks"])
def test_who_has_waited_and_has_all_of_it_does_not_ask_the_store_again(tail: int) -> None:
    """Of a prompt of whole blocks the last is computed, so nobody loads it either."""
    engine = Engine()
    engine.tokens = len(HASHES) * SIZE + tail
    engine.admit("leader")
    assert engine.ask("follower") == ASK_AGAIN
    engine.report("leader")
    assert engine.ask("follower", 7 + tail) == NOTHING
    assert engine.store.lookups == 1, "the leader's"


def test_vllm_counts_as_loaded_what_a_request_loads_and_nothing_as_adopted() -> None:
    """`vllm:prompt_tokens_by_source`: who is parked gets local hits, which vLLM counts by itself."""
    engine = Engine()
    for name, local in ("whole", 0), ("half", 4):
        assert engine.admit(name, local) == 8 - local
        assert engine.rules.adopted_tokens(name) == 0
        engine.report(name)


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_the_same_tokens_have_the_same_time_at_any_block_size(block_size: int) -> None:
    """64k tokens: 215 s at block size 16, and not 23 s at 256."""
    policy = Config().policy_for(block_size)
    assert policy.budget_s(65536 // block_size) == Policy().budget_s(65536 // 16) == pytest.approx(214.8)
