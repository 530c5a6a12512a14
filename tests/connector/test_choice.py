"""Load or compute, over fakes: what a request is answered that has the choice, and what steps tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from connector_patch.choice import Chooser
from connector_patch.config import Config, LoadOrCompute
from connector_patch.park import ParkScheduler
from connector_patch.rules import ASK_AGAIN, NOTHING
from connector_patch.steps import Steps
from singleflight.core.fit import ENOUGH
from singleflight.core.policy import Policy
from singleflight.core.prefill import Work
from singleflight.core.receive import STALE_S
from tests.connector.test_health import HASHES, SIZE, FakeStore
from tests.support import Clock

TOKENS = len(HASHES) * SIZE + 1
LOADS = (len(HASHES) * SIZE, True)
BUDGET = 64


def step(prefills: dict[str, tuple[int, int, int]] | None = None, decodes: int = 0, **more: Any) -> Any:
    """A fake SchedulerOutput. `prefills`: new request -> its first token, how many, its prompt's length."""
    new = [
        SimpleNamespace(req_id=r, num_computed_tokens=first, prompt_token_ids=[0] * length)
        for r, (first, _, length) in (prefills or {}).items()
    ]
    going = {f"d{i}": 1 for i in range(decodes)} | more.pop("going", {})
    tokens = {r: count for r, (_, count, _) in (prefills or {}).items()} | going
    computed = more.pop("computed", {})
    cached = SimpleNamespace(
        req_ids=list(going),
        num_computed_tokens=[computed.get(r, 99) for r in going],
        resumed_req_ids=set(),
        all_token_ids={},
    )
    plain = {"finished_req_ids": set(), "preempted_req_ids": None, "scheduled_spec_decode_tokens": {}}
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        **plain | more,
    )


class Engine:
    """vLLM's part, for requests with prompts of one length. A block takes a second to load, and `token_s` a
    token to compute."""

    def __init__(self, token_s: float = 1 / SIZE) -> None:
        self.store, self.clock = FakeStore(), Clock()
        self.chooser = Chooser(Policy(compute_decode_share=0.1), SIZE, 1, BUDGET)
        self.rules = ParkScheduler(cast(Any, self.store), Config(), self.clock, chooser=self.chooser)
        for _ in range(ENOUGH):
            self.chooser.queue._prices.observe(8, 1, 8.0)
            self.chooser.queue._learned = self.clock()
            self.chooser.steps.speed.observe(Work.of(0, TOKENS), 0, TOKENS * token_s)

    def request(self, name: str) -> Any:
        """Its prompt is nobody else's."""
        hashes = [f"{name}-{i}".encode() for i in range(len(HASHES))]
        return SimpleNamespace(
            request_id=name,
            block_hashes=hashes,
            num_tokens=TOKENS,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
        )

    def ask(self, name: str) -> Any:
        return self.rules.match(self.request(name), 0)

    def allocate(self, name: str, tokens: int) -> None:
        self.rules.allocated(self.request(name), cast(Any, None), tokens)

    def loads(self, *names: str) -> None:
        """They load, in a pass of their own."""
        for name in names:
            assert self.ask(name) == LOADS
            self.allocate(name, LOADS[0])
        self.passes()

    def passes(self, output: Any = None) -> None:
        self.rules.scheduled(output or step())
        self.rules.step_done()

    @property
    def chose(self) -> tuple[int, int]:
        stats = self.rules.table.stats
        return stats.chose_load, stats.chose_compute


@pytest.fixture
def behind_two() -> Engine:
    """Two loads of eight seconds each are in the air: a third takes 24 s, computing 8."""
    engine = Engine()
    engine.chooser._policy = Policy(compute_patience=100.0, compute_decode_share=0.1)
    engine.loads("a", "b")
    engine.chooser._policy = Policy(compute_decode_share=0.1)
    return engine


class TestAnswers:
    def test_whoever_would_wait_for_long_computes_and_plans_no_load(self, behind_two: Engine) -> None:
        assert behind_two.ask("c") == NOTHING
        assert behind_two.store.planned == {}
        behind_two.allocate("c", 0)
        assert behind_two.chose == (2, 1)
        assert "c" not in behind_two.rules._loads

    def test_after_a_slow_minute_of_the_store_loads_come_back(self) -> None:
        """Nothing is in the air, so nobody waits; what loads took then is all that is known."""
        engine = Engine(token_s=0.1 / SIZE)
        assert engine.ask("a") == NOTHING
        engine.allocate("a", 0)
        engine.passes()
        engine.clock.advance(STALE_S + 1)
        engine.loads("b")
        assert engine.ask("c") == LOADS, "nobody knows any more what a load takes"

    def test_old_prices_of_loads_that_are_queued_still_count(self, behind_two: Engine) -> None:
        behind_two.chooser.queue._learned = -2 * STALE_S
        assert behind_two.ask("c") == NOTHING

    def test_it_keeps_to_that_until_it_is_allocated(self, behind_two: Engine) -> None:
        """There was no room for it. The queue is short by now; it has been counted as a prefill."""
        assert behind_two.ask("c") == NOTHING
        behind_two.passes()
        behind_two.clock.advance(16)
        assert behind_two.ask("c") == NOTHING
        behind_two.allocate("c", 0)
        behind_two.passes()
        assert behind_two.ask("c") == LOADS, "preempted: it chooses anew"

    def test_whoever_has_chosen_to_load_keeps_to_that(self, behind_two: Engine) -> None:
        behind_two.clock.advance(15)
        assert behind_two.ask("c") == LOADS
        behind_two.allocate("d", 0)
        for i in range(9):
            behind_two.chooser.queued(f"q{i}", 8, behind_two.clock())
        assert behind_two.ask("c") == LOADS
        behind_two.passes()
        assert behind_two.ask("d") == NOTHING

    def test_prefills_before_it_count(self, behind_two: Engine) -> None:
        """The second to compute would be done in 16 s, the third in 24, as soon as a load."""
        assert [behind_two.ask(name) for name in "cd"] == [NOTHING, NOTHING]
        assert behind_two.ask("e") == LOADS

    def test_what_runs_counts_until_it_is_computed(self, behind_two: Engine) -> None:
        behind_two.passes(step({"x": (0, BUDGET, 6 * TOKENS)}))
        assert behind_two.ask("c") == LOADS
        behind_two.passes(step(finished_req_ids={"x"}))
        assert behind_two.ask("d") == NOTHING

    def test_beside_many_decodes_it_loads(self, behind_two: Engine) -> None:
        behind_two.passes(step(decodes=7))
        assert behind_two.ask("c") == LOADS
        behind_two.passes(step(decodes=6))
        assert behind_two.ask("d") == NOTHING

    def test_it_lets_a_step_go_first_in_which_loads_start(self, behind_two: Engine) -> None:
        """The worker may hear of a load only after the forward: a prefill would hold it up."""
        behind_two.chooser.queued("e", 8, behind_two.clock())
        assert behind_two.ask("c") == ASK_AGAIN
        assert behind_two.store.planned == {}
        behind_two.passes()
        assert behind_two.ask("c") == NOTHING

    def test_but_not_for_ever(self, behind_two: Engine) -> None:
        """Half of what it gains (32 s to 8) may be lost."""
        behind_two.chooser.queued("e", 8, behind_two.clock())
        for _ in range(12):
            assert behind_two.ask("c") == ASK_AGAIN
            behind_two.clock.advance(1)
        assert behind_two.ask("c") == NOTHING

    def test_a_step_that_has_room_for_one_prefill_gets_no_part_of_another(self, behind_two: Engine) -> None:
        """It would end no sooner, and the other, and all whose loads have landed, later. So it waits for
        longer than half of what it gains, 12 s here."""
        assert [behind_two.ask(name) for name in "cd"] == [NOTHING, NOTHING]
        behind_two.clock.advance(14)
        behind_two.allocate("c", 0)
        assert behind_two.ask("d") == ASK_AGAIN
        behind_two.passes()
        assert behind_two.ask("d") == NOTHING

    def test_others_that_begin_in_every_step_do_not_keep_it_waiting_for_ever(
        self, behind_two: Engine
    ) -> None:
        """Of a higher priority, say. After 16 s its load would have landed before it has computed."""
        assert [behind_two.ask(name) for name in "cd"] == [NOTHING, NOTHING]
        behind_two.clock.advance(17)
        behind_two.allocate("c", 0)
        assert behind_two.ask("d") == NOTHING

    def test_a_fast_store_is_always_loaded_from(self) -> None:
        engine = Engine(token_s=100.0)
        engine.loads(*"abcdefgh")
        assert engine.chose == (8, 0)

    def test_nothing_is_remembered_of_who_is_gone(self, behind_two: Engine) -> None:
        assert behind_two.ask("c") == NOTHING
        behind_two.rules.finished("c", aborted=True)
        assert (behind_two.chooser._chosen, behind_two.chooser._computing) == ({}, {})

    def test_off_is_stock(self) -> None:
        vllm, store = cast(Any, None), cast(Any, FakeStore())
        assert Chooser.of(Config(), vllm, store) is None
        assert Config().load_or_compute is LoadOrCompute.OFF


class TestSteps:
    def test_with_batches_in_flight_a_step_begins_when_the_one_before_is_done(self) -> None:
        """Asynchronous scheduling: scheduled(2) comes before done(1)."""
        steps = Steps(BUDGET)
        now = 0.0
        steps.scheduled(step({"r": (0, 32, 32)}), now)
        for i in range(2 * ENOUGH):
            steps.scheduled(step({f"r{i}": (0, 32, 32)}), now + 0.1)
            now += 3.2
            steps.done(now)
        assert steps.speed.seconds(Work.of(0, 32)) == pytest.approx(3.2)

    def test_a_pause_between_steps_is_no_part_of_them(self) -> None:
        steps = Steps(BUDGET)
        for i in range(ENOUGH):
            steps.scheduled(step({f"r{i}": (0, 32, 32)}), 100.0 * i)
            steps.done(100.0 * i + 3.2)
        assert steps.speed.seconds(Work.of(0, 32)) == pytest.approx(3.2)

    def test_with_pipeline_stages_it_learns_nothing(self) -> None:
        steps = Steps(BUDGET, learns=False)
        for i in range(ENOUGH):
            steps.scheduled(step({f"r{i}": (0, 32, 32)}), float(i))
            steps.done(i + 0.5)
        assert steps.speed.seconds(Work.of(0, 32)) is None

    def test_the_rest_of_a_prompt_in_chunks_is_backlog(self) -> None:
        steps = Steps(BUDGET)
        steps.scheduled(step({"r": (8, 24, 64)}), 0.0)
        steps.done(1.0)
        assert (steps.backlog().tokens, steps.decodes) == (32, 0)
        steps.scheduled(step(decodes=2, going={"r": 30}, computed={"r": 32}), 1.0)
        assert (steps.backlog().tokens, steps.decodes) == (30 + 2, 2), "what is in flight is not done"
        steps.done(2.0)
        steps.scheduled(step(going={"r": 2}, computed={"r": 62}), 2.0)
        steps.done(3.0)
        assert steps.backlog().tokens == 0

    def test_drafts_are_decodes(self) -> None:
        steps = Steps(BUDGET)
        steps.scheduled(step(going={"r": 4}, scheduled_spec_decode_tokens={"r": [1, 2, 3]}), 0.0)
        assert (steps.backlog().tokens, steps.decodes) == (0, 1)
