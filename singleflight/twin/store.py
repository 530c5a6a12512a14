"""What the store holds, and what asking it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Clock:
    """Simulated time, s. The scheduler's own work moves it on within a pass."""

    def __init__(self) -> None:
        self.now = 0.0


class Store:
    """The scheduler's side of the store.

    The answer is the longest prefix of the prompt that is stored, as `MooncakeStoreScheduler` gives it: from
    the first block on, whatever is cached locally. Nothing stored is ever lost.

    Args:
        stored_from: for each name, when it is there; inf: not yet.
        prompts: for each request the names of the blocks that are looked up.
        latency_s, per_block_s: what a lookup costs. again: the share of the latency that all but the first of
            a step take. asynchronous: one thread asks, in turn, while the engine
            goes on; what is stored when the lookup is made counts.
    """

    def __init__(
        self,
        clock: Clock,
        stored_from: list[float],
        prompts: Sequence[Sequence[int]],
        latency_s: float,
        per_block_s: float,
        again: float,
        asynchronous: bool,
    ) -> None:
        self._clock = clock
        self._stored_from = stored_from
        self._prompts = prompts
        self._latency_s = latency_s
        self._per_block_s = per_block_s
        self._again = again
        self._share = 1.0
        self._asynchronous = asynchronous
        self._free_at = 0.0
        self._answers: dict[int, tuple[float, int]] = {}
        self.lookups = [0] * len(prompts)

    def next_step(self) -> None:
        self._share = 1.0

    def put(self, names: Iterable[int], now: float) -> None:
        for name in names:
            if self._stored_from[name] > now:
                self._stored_from[name] = now

    def ask(self, request: int, local: int) -> int | None:
        """Blocks beyond the `local` ones; None: ask again in a later step."""
        names = self._prompts[request]
        if not names:
            return 0
        if request not in self._answers:
            self.lookups[request] += 1
            cost = self._share * self._latency_s + len(names) * self._per_block_s
            self._share = self._again
            stored = self._stored(names)
            if not self._asynchronous:
                self._clock.now += cost
                return max(stored - local, 0)
            self._free_at = max(self._free_at, self._clock.now) + cost
            self._answers[request] = self._free_at, stored
        ready_at, stored = self._answers[request]
        if self._clock.now < ready_at:
            return None
        del self._answers[request]
        return max(stored - local, 0)

    def withdraw(self, request: int) -> None:
        """The answer is not wanted any more; a lookup under way still takes its time."""
        self._answers.pop(request, None)

    def answer_due(self, request: int) -> float:
        """When the answer is there."""
        return self._answers[request][0]

    def _stored(self, names: Sequence[int]) -> int:
        for i, name in enumerate(names):
            if self._stored_from[name] > self._clock.now:
                return i
        return len(names)
