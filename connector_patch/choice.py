"""Load or compute: what is known of both machines, and what each request has chosen.

A choice is made when vLLM asks about a request, and holds until it is allocated: it may be asked many times.
The rules (`rules.py`) act on it; shadow mode only counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from singleflight.core.choice import Chosen, Expected
from singleflight.core.prefill import Work
from singleflight.core.receive import ReceiveQueue

from .config import Config, LoadOrCompute
from .sparse import Sparse
from .steps import Steps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from singleflight.core.policy import Policy

    from .store import Store

logger = init_logger(f"vllm.{__name__}")


class _Turn(NamedTuple):
    """What a request will compute, and when half and all of what it gains by that is lost."""

    work: Work
    half_lost: float
    lost: float


class Chooser:
    """One per engine; called by the scheduler's thread only.

    Args:
        lanes: loads that the worker runs at a time.
        budget: tokens of a step, at most.
        learns: whether the time between steps is that of a step (`steps.py`).
        pretends: nobody acts on what is chosen (shadow mode).
    """

    def __init__(
        self,
        policy: Policy,
        block_size: int,
        lanes: int,
        budget: int,
        learns: bool = True,
        pretends: bool = False,
    ) -> None:
        self.queue = ReceiveQueue(lanes)
        self.steps = Steps(budget, learns)
        self.waiters: Callable[[Hashable], int] = lambda request_id: 1
        """How many wait for the load of this request, itself included."""
        self._policy, self._block_size, self._budget = policy, block_size, budget
        self._pretends = pretends
        self._sparse = Sparse()
        self._chosen: dict[str, Chosen] = {}
        # Have chosen to compute, and have not been allocated yet.
        self._computing: dict[str, _Turn] = {}
        # Of this pass: prompts that vLLM computes from now on; whether somebody in it gains by a short step.
        self._begun: list[Work] = []
        self._hurry = False

    @classmethod
    def of(cls, config: Config, vllm: VllmConfig, store: Store, pretends: bool = False) -> Chooser | None:
        """What the configuration asks for; None where everybody loads."""
        if config.load_or_compute is LoadOrCompute.OFF:
            return None
        budget = vllm.scheduler_config.max_num_batched_tokens
        policy, learns = config.policy_for(store.block_size), vllm.parallel_config.pipeline_parallel_size == 1
        return cls(policy, store.block_size, store.parallel_loads, budget, learns, pretends)

    # -- what a request does -----------------------------------------------------------------------------

    def choose(self, request: Request, num_local_tokens: int, external: int, now: float) -> Chosen:
        """Load or compute the `external` tokens that the store has behind the local hit."""
        request_id = request.request_id
        held = self._chosen.get(request_id)
        if held is None:
            held = self._chosen[request_id] = self._choose(request, num_local_tokens, external, now)
        return held

    def steps_back(self, request_id: str, now: float) -> bool:
        """Whether a request that computes lets a step go first: others have their first token after it, whose
        loads have landed or who compute; and of loads that are queued in this pass, the worker may hear only
        after the forward (on CPUs). A step without its prefill is short.

        It does so for as long as half of what it gains, once its turn has come. And for as long as all of it
        where this step has another's prefill and no room for all of its own: it would end no sooner, and the
        other later.
        """
        turn = self._computing[request_id]
        begun = sum(work.tokens for work in self._begun)
        crowded = begun >= self.steps.speed.substantial and begun + turn.work.tokens > self._budget
        return now < turn.lost if crowded else self._hurry and now < turn.half_lost

    def computes_anyway(self, request: Request, num_local_tokens: int) -> None:
        """The store has nothing for it."""
        self._begin(Work.of(num_local_tokens, request.num_tokens - num_local_tokens))

    def allocated(self, request_id: str, num_external_tokens: int) -> Chosen | None:
        """vLLM has allocated. Returns what it had chosen, if it has come to that."""
        chosen = self._forget(request_id)
        if chosen is None:
            return None
        loads = bool(num_external_tokens)
        return chosen if self._pretends or loads is (chosen is Chosen.LOAD) else None

    def finished(self, request_id: str) -> None:
        self._computing.pop(request_id, None)
        self._forget(request_id)

    # -- what the engine does ----------------------------------------------------------------------------

    def queued(self, request_id: str, blocks: int, now: float) -> None:
        """A load has been planned."""
        self.queue.add(request_id, blocks, now)
        self._hurry = True

    def scheduled(self, output: SchedulerOutput, now: float) -> None:
        """The end of a pass."""
        self.steps.scheduled(output, now)
        self._begun.clear()
        self._hurry = False

    def reported(self, loads: Collection[str], now: float, *, failed: bool = False) -> None:
        """The end of a step: these loads have ended."""
        if len(self.queue):
            self.queue.reported(loads, now, failed=failed)
            self._hurry |= bool(loads)

    def done(self, now: float) -> None:
        """A step has been heard of."""
        self.steps.done(now)

    # -- inside ------------------------------------------------------------------------------------------

    def _choose(self, request: Request, num_local_tokens: int, external: int, now: float) -> Chosen:
        load_s = self.queue.load_s(external // self._block_size, now)
        least_s = self.steps.speed.at_least_s(external)
        if load_s is None or least_s is None or load_s <= self._policy.compute_patience * least_s:
            return Chosen.LOAD  # the usual case costs no more than this
        own = Work.of(num_local_tokens, request.num_tokens - num_local_tokens)
        expected = self._expected(own, external, load_s, now)
        chosen = expected.chosen(self._policy, self._budget)
        if chosen is Chosen.COMPUTE and self.queue.forgets(now):
            return Chosen.LOAD
        if chosen is Chosen.COMPUTE and not self._pretends:
            self._computing[request.request_id] = _Turn(own, now + expected.turn_s, now + expected.lost_s)
            if requests := self._sparse.due(chosen):
                logger.info(
                    "kv-singleflight: %s computes %d tokens that the store has: expected are %s"
                    " (such requests since the last such line: %d).",
                    request.request_id,
                    external,
                    expected,
                    requests,
                )
        return chosen

    def _expected(self, own: Work, external: int, load_s: float, now: float) -> Expected:
        """`load_s`: until its load would have landed."""
        decodes, speed = self.steps.decodes, self.steps.speed
        before = self.steps.backlog()
        for work in (*self._begun, *(turn.work for turn in self._computing.values())):
            before = before.beside(work)
        rest = Work.of(own.end - own.tokens + external, own.tokens - external)
        wait_s, own_s, rest_s = (speed.seconds(work, decodes) for work in (before, own, rest))
        if wait_s is None or own_s is None or rest_s is None:
            return Expected(load_s, None, decodes=decodes)
        computed_s = wait_s + own_s
        others_s = 0.0  # for those whose loads land before it begins, it steps back
        for request_id, lands_s in self.queue.landings(now):
            if wait_s <= lands_s < computed_s:
                others_s += self.waiters(request_id) * (computed_s - lands_s)
        return Expected(max(load_s, wait_s) + rest_s, computed_s, own_s, others_s, decodes)

    def _forget(self, request_id: str) -> Chosen | None:
        if (computing := self._computing.pop(request_id, None)) is not None:
            self._begin(computing.work)
        return self._chosen.pop(request_id, None)

    def _begin(self, work: Work) -> None:
        """It is in this pass, as far as there is room."""
        self._begun.append(work)
        self._hurry |= work.tokens >= self.steps.speed.substantial


class Heard:
    """Who has a chooser hear of the engine's steps, by its own clock."""

    chooser: Chooser | None
    _clock: Callable[[], float]

    def scheduled(self, output: SchedulerOutput) -> None:
        """End of the pass: what the step consists of. Only where there is a `chooser`."""
        assert self.chooser is not None
        self.chooser.scheduled(output, self._clock())

    def step_done(self) -> None:
        """A step has been heard of. Only where there is a `chooser`."""
        assert self.chooser is not None
        self.chooser.done(self._clock())
