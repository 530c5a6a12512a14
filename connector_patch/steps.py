"""What an engine's steps tell: how fast it prefills, what it has still to prefill, how many requests decode.

vLLM's order, with batches in flight (asynchronous scheduling): scheduled(1), scheduled(2), done(1), ... A
batch is computed from when it was scheduled, or the one before it was done, until it is done.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from singleflight.core.prefill import PrefillSpeed, Work

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

IN_FLIGHT: Final = 4
"""More batches than vLLM has in flight without pipeline stages: an end has been missed, and all are
forgotten."""
NOTHING: Final = Work(0)


class Steps:
    """One per engine; called by the scheduler's thread only.

    Args:
        budget: tokens of a step, at most.
        learns: not with pipeline stages: a batch is then in several of them, and its time is no step's.
    """

    def __init__(self, budget: int, learns: bool = True) -> None:
        self.speed = PrefillSpeed(budget)
        self.decodes = 0
        """Requests that decode from the last step that was scheduled on, as far as is known."""
        self._learns = learns
        self._in_flight: deque[tuple[float, Work, int]] = deque()
        self._done_at = 0.0
        self._left: dict[str, tuple[int, int]] = {}  # in prefill: request -> first token, tokens to compute

    def scheduled(self, output: SchedulerOutput, now: float) -> None:
        """vLLM has made up a step."""
        tokens = output.num_scheduled_tokens
        if self._left:
            for gone in (output.finished_req_ids, output.preempted_req_ids or ()):
                for request_id in gone:
                    self._left.pop(request_id, None)
        work, decodes = NOTHING, len(tokens)
        if self._left or output.scheduled_new_reqs or decodes != output.total_num_scheduled_tokens:
            work, prefills = self._prefill(output)
            decodes -= prefills
        self.decodes = max(len(tokens) - len(self._left), 0)
        self._in_flight.append((now, work, decodes))

    def done(self, now: float) -> None:
        """The oldest step in flight has been heard of."""
        if not self._in_flight:
            return
        launched, work, decodes = self._in_flight.popleft()
        if len(self._in_flight) > IN_FLIGHT:
            self._in_flight.clear()
            return
        began, self._done_at = max(launched, self._done_at), now
        if self._learns:
            self.speed.observe(work, decodes, now - began)

    def backlog(self) -> Work:
        """What running requests have still to prefill, batches in flight included."""
        work = NOTHING
        for _, in_flight, _ in self._in_flight:
            work = work.beside(in_flight)
        for first, tokens in self._left.values():
            work = work.beside(Work.of(first, tokens))
        return work

    def _prefill(self, output: SchedulerOutput) -> tuple[Work, int]:
        """The prompt tokens in this step, and of how many requests. What is left of each prompt is noted."""
        work, tokens = NOTHING, output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            first, count = new.num_computed_tokens, tokens[new.req_id]
            work = work.beside(Work.of(first, count))
            self._note(new.req_id, first + count, _length(new))
        prefills = len(output.scheduled_new_reqs)
        cached, drafts = output.scheduled_cached_reqs, output.scheduled_spec_decode_tokens
        for request_id, first in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            count = tokens.get(request_id, 0)
            if request_id in cached.resumed_req_ids and request_id in cached.all_token_ids:
                self._left[request_id] = (first, len(cached.all_token_ids[request_id]) - first)
            if request_id in self._left:
                self._note(request_id, first + count, first + self._left[request_id][1])
            elif count <= 1 + len(drafts.get(request_id, ())):
                continue
            work = work.beside(Work.of(first, count))
            prefills += 1
        return work, prefills

    def _note(self, request_id: str, first: int, end: int) -> None:
        if first < end:
            self._left[request_id] = (first, end - first)
        else:
            self._left.pop(request_id, None)


def _length(new: NewRequestData) -> int:
    """Tokens that it has to have computed before its first one."""
    tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
    if tokens is not None:
        return len(tokens)
    return int(new.prompt_embeds.shape[0]) if new.prompt_embeds is not None else 0
