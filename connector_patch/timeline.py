"""When each request was looked up, admitted, loaded and answered, for the recorder's rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from singleflight.traces.request import Observed

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Times:
    """Seconds since the epoch; 0.0: not yet."""

    looked_up: float
    local_tokens: int
    admitted: float = 0.0
    loaded_blocks: int = 0
    landed: float = 0.0
    prefill: float = 0.0
    prefill_tokens: int | None = None
    first_token: float = 0.0


class Timeline:
    """One per engine; called by the scheduler's thread only.

    Of a request that is preempted and starts again, the first times are kept.

    Args:
        clock: seconds since the epoch, as vLLM's arrival times.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._times: dict[str, _Times] = {}
        self._unanswered: dict[str, Request] = {}
        """Admitted, and without a first token."""

    def looked_up(self, request: Request, num_local_tokens: int) -> None:
        """vLLM asks about a request, in each step until it is admitted."""
        times = self._times.get(request.request_id)
        if times is None:
            self._times[request.request_id] = _Times(self._clock(), num_local_tokens)
        elif not times.admitted:
            times.local_tokens = num_local_tokens

    def allocated(self, request: Request, num_external_tokens: int, planned: range | None) -> None:
        """vLLM has given it blocks: for a load, of which `planned` is its own part, or for its prefill."""
        times = self._times.get(request.request_id)
        if times is None or times.prefill:
            return
        now = self._clock()
        if not times.admitted:
            times.admitted = now
            times.loaded_blocks = len(planned) if planned is not None else 0
            times.prefill_tokens = request.num_prompt_tokens - times.local_tokens - num_external_tokens
            self._unanswered[request.request_id] = request
        if not num_external_tokens:
            times.prefill = now

    def output(self, out: KVConnectorOutput) -> None:
        """What the workers report, followers included."""
        if not out.finished_recving:
            return
        now = self._clock()
        for request_id in out.finished_recving:
            if (times := self._times.get(request_id)) is not None and not times.prefill:
                times.landed = now

    def step(self) -> None:
        """A step's tokens have been added to their requests."""
        answered = [name for name, request in self._unanswered.items() if request.num_output_tokens]
        if answered:
            now = self._clock()
            for name in answered:
                del self._unanswered[name]
                self._times[name].first_token = now

    def over(self, request: Request) -> Observed | None:
        """What was seen of a request that has ended; None if nothing was."""
        times = self._times.pop(request.request_id, None)
        waited = self._unanswered.pop(request.request_id, None)
        if times is None:
            return None
        if waited is not None and request.num_output_tokens:  # its first step was its last
            times.first_token = self._clock()

        def after_ms(then: float) -> float | None:
            return round(max(0.0, then - request.arrival_time) * 1000, 3) if then else None

        return Observed(
            looked_up_ms=after_ms(times.looked_up),
            admitted_ms=after_ms(times.admitted),
            loaded_blocks=times.loaded_blocks,
            landed_ms=after_ms(times.landed),
            prefill_ms=after_ms(times.prefill),
            prefill_tokens=times.prefill_tokens,
            first_token_ms=after_ms(times.first_token),
        )
