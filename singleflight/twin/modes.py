"""The rules of stock, attach and park mode, over the connector's own table, join policy and breaker.

As `connector_patch/rules.py`, `attach.py` and `park.py`, for loads that never fail and clients that never
leave. So the table's followers fall back for their deadline alone, or because whom they waited for did.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from singleflight.core.breaker import Breaker
from singleflight.core.estimate import Forecast
from singleflight.core.stats import Outcome, Reason
from singleflight.core.table import Effect, Left, PendingBlockTable, Publish, Segment
from singleflight.twin.instance import Instance, Mode
from singleflight.twin.pool import Pool
from singleflight.twin.store import Clock, Store


@dataclass(slots=True)
class Match:
    """The answer to a lookup.

    Attributes:
        external: blocks beyond the local ones that will come from outside, adopted ones included.
        adopted: of these the first, GPU blocks that others are loading into.
        segments: where in the table. made_at: when it was asked, s.
    """

    external: int
    adopted: Sequence[int] = ()
    segments: Sequence[Segment] = ()
    made_at: float = 0.0


ASK_AGAIN: Final = None


class Stock:
    """vLLM's connector: everybody loads for itself."""

    coordinates = False
    """Whether the layer's own work is to be paid for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def match(self, request: int, local: int) -> Match | None:
        """What comes from outside; None: ask again, see `parked`."""
        answer = self._store.ask(request, local)
        return ASK_AGAIN if answer is None else Match(answer)

    def parked(self, request: int) -> bool:
        """Whether it need not be asked before `output` names it."""
        return False

    def allocated(self, request: int, match: Match, load: range, blocks: Sequence[int]) -> None:
        """It has been given its `blocks`, and will load those that `load` numbers itself, if any."""

    def due(self) -> bool:
        """End of the pass: whether followers are to be let go for their deadline in this step's output."""
        return False

    def news(self) -> bool:
        """Whether `output` has something to say although no load has ended."""
        return False

    def output(self, ended: Iterable[int], tick: bool) -> tuple[list[int], list[int], list[int]]:
        """The loads of these requests have ended.

        Returns requests that have all their blocks; those that start again without any; those that may be
        asked again.
        """
        return sorted(ended), [], []

    def finished(self, request: int) -> None:
        pass


@dataclass(slots=True)
class Load:
    """A request's own load that the worker has not reported yet. `generation`: None: not in the table."""

    request: int
    blocks: range
    generation: int | None
    started: float
    ended: float | None = None


class Rules(Stock, ABC):
    """What attach and park mode share (`connector_patch/rules.py`)."""

    coordinates = True
    loads_rest_after_wait: bool

    def __init__(
        self, store: Store, clock: Clock, pool: Pool, names: Sequence[Sequence[int]], instance: Instance,
        asked: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(store)
        policy = instance.rules
        self.table = PendingBlockTable(policy, Forecast(instance.receive_threads))
        self._breaker = Breaker(policy.breaker_failures, policy.breaker_pause_s)
        self._clock = clock
        self._pool = pool
        self._names = names
        self._asked = asked
        self._recompute = instance.on_deadline == "recompute"
        self._asked_at = 0.0
        self._loads: dict[int, Load] = {}
        self._no_load: set[int] = set()

    def match(self, request: int, local: int) -> Match | None:
        known = self._known_answer(request, local)
        if known is not None:
            return known
        if not len(self.table):
            return super().match(request, local)
        now = self._clock.now
        self._judge(now)
        names, stop = self._names[request], self._asked[request]
        segments = self.table.run(names, local, stop) if self._may_join(request, now) else []
        if not segments:
            return super().match(request, local)
        if not self._breaker.allows(now):
            return Match(0) if self._recompute else super().match(request, local)
        shared, own = sum(segment.length for segment in segments), 0
        end = local + shared
        suffix_unknown = end < stop and not segments[-1].known_miss(names[end])
        if suffix_unknown or not self.table.worth_joining(segments, shared, now):
            answer = super().match(request, local)
            if answer is None:
                return ASK_AGAIN
            own = max(answer.external - shared, 0)
            after = own if self.loads_rest_after_wait else 0
            alone = answer.external
            if alone >= shared and not self.table.worth_joining(segments, alone, now, then=after):
                return answer
        return self._join(request, segments, shared, own, now)

    def due(self) -> bool:
        self._asked_at = self._clock.now
        return self.table.due(self._asked_at)

    def finished(self, request: int) -> None:
        self.table.leave(request)

    @abstractmethod
    def _join(self, request: int, segments: list[Segment], shared: int, own: int, now: float) -> Match | None:
        """The request waits for the `shared` blocks, and has `own` ones to load behind them."""

    def _known_answer(self, request: int, local: int) -> Match | None:
        return Match(0) if request in self._no_load else None

    def _may_join(self, request: int, now: float) -> bool:
        return self.table.may_join(request, now)

    def _lead(self, request: int, load: range, destination: Sequence[Any], now: float) -> None:
        names = self._names[request]
        miss = names[load.stop] if load.stop < self._asked[request] else None
        flight = self.table.lead(request, names[load.start : load.stop], destination, now, miss)
        self._loads[request] = Load(request, load, flight.generation if flight else None, now)

    def _judge(self, now: float) -> None:
        if self.table.due(now):
            before = self.table.stats.overdue
            self.table.judge(now)
            for _ in range(self.table.stats.overdue - before):
                self._breaker.failed(now)

    def _expire(self) -> set[int]:
        """As of the end of the pass: what has landed by now has landed."""
        self._judge(self._asked_at)
        return self._carry_out(self.table.expire(self._asked_at))

    def _end_loads(self, ended: Iterable[int]) -> set[int]:
        now = self._clock.now
        effects: list[Left] = []
        for request in sorted(ended):
            load = self._loads.pop(request)
            if now - load.started < self.table.budget_s(len(load.blocks)):
                self._breaker.landed()
            load.ended = now
            if load.generation is not None:
                effects += self._land(load)
        return self._carry_out(effects)

    def _land(self, load: Load) -> list[Left]:
        assert load.generation is not None
        effects: list[Effect] = self.table.land(load.generation, self._clock.now, ended=load.ended)
        left: list[Left] = []
        for effect in effects:
            if isinstance(effect, Publish):
                self._publish(load)
            else:
                left.append(effect)
        return left

    def _publish(self, load: Load) -> None:
        """Make a landed load's blocks local prefix-cache hits."""

    def _carry_out(self, effects: Iterable[Left]) -> set[int]:
        gone = set()
        for effect in effects:
            request = effect.request
            assert isinstance(request, int)
            if effect.outcome is Outcome.FELL_BACK:
                late = effect.reason is Reason.DEADLINE
                if self._recompute if late else not self.table.may_join(request, self._clock.now):
                    self._no_load.add(request)
            self._left(request, effect.outcome)
            gone.add(request)
        return gone

    @abstractmethod
    def _left(self, request: int, outcome: Outcome) -> None:
        """The request waits for nothing any more."""


class Attach(Rules):
    """A follower adopts the leader's pending blocks, and loads its own suffix at once (`attach.py`)."""

    loads_rest_after_wait = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pending: set[int] = set()  # requests that wait for blocks
        self._starts_again: set[int] = set()
        self._complete_early: dict[int, Load] = {}
        self._blocks: dict[int, Sequence[int]] = {}
        self._touched: set[int] = set()  # since the last output

    def _join(self, request: int, segments: list[Segment], shared: int, own: int, now: float) -> Match | None:
        if not own:
            self._store.withdraw(request)
        adopted = [block for segment in segments for block in segment.destination]
        return Match(shared + own, adopted, segments, now)

    def allocated(self, request: int, match: Match, load: range, blocks: Sequence[int]) -> None:
        if not match.external:
            return
        self._pending.add(request)
        self._blocks[request] = blocks
        now = self._clock.now
        if match.segments:
            now = match.made_at
            self.table.attach(request, match.segments, now)
        if load:
            self._lead(request, load, blocks[load.start : load.stop], now)

    def due(self) -> bool:
        self._touched |= self._land_in_order()  # on what this pass has computed or promoted
        return super().due()

    def output(self, ended: Iterable[int], tick: bool) -> tuple[list[int], list[int], list[int]]:
        touched = self._touched | {*ended} | self._end_loads(ended) | self._land_in_order()
        self._touched = set()
        if tick:
            touched |= self._expire() | self._land_in_order()
        ready, again = [], []
        for request in sorted(touched):
            if request in self._pending and self._settled(request):
                self._pending.discard(request)
                del self._blocks[request]
                if request in self._starts_again:
                    self._starts_again.discard(request)
                    again.append(request)
                else:
                    ready.append(request)
        return ready, again, []

    def news(self) -> bool:
        return bool(self._touched)

    def _settled(self, request: int) -> bool:
        return (
            request not in self._loads
            and request not in self._complete_early
            and not self.table.waiting(request)
        )

    def _land(self, load: Load) -> list[Left]:
        """Not before the block that it stands on is published."""
        if self._stands_on_published(load):
            return super()._land(load)
        self._complete_early[load.request] = load
        return []

    def _stands_on_published(self, load: Load) -> bool:
        start = load.blocks.start
        return start == 0 or self._pool.find(self._names[load.request][start - 1]) >= 0

    def _land_in_order(self) -> set[int]:
        touched: set[int] = set()
        while over := [load for load in self._complete_early.values() if not self._keeps_waiting(load)]:
            for load in over:
                assert load.generation is not None
                touched.add(load.request)
                del self._complete_early[load.request]
                if self._stands_on_published(load):
                    effects = super()._land(load)
                else:
                    effects = self.table.fail(load.generation, self._clock.now, charged=False)
                touched |= self._carry_out(effects)
        return touched

    def _keeps_waiting(self, load: Load) -> bool:
        return not self._stands_on_published(load) and self.table.waiting(load.request)

    def _publish(self, load: Load) -> None:
        names, blocks = self._names[load.request], self._blocks[load.request]
        for i in load.blocks:
            self._pool.cache(blocks[i], names[i])

    def _left(self, request: int, outcome: Outcome) -> None:
        if outcome is Outcome.FELL_BACK:
            self._starts_again.add(request)


class Park(Rules):
    """A follower is asked again once the leader's blocks are in the local cache (`park.py`)."""

    loads_rest_after_wait = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._served: set[int] = set()
        self._deadlines: dict[int, float] = {}
        self._free: list[int] = []

    def parked(self, request: int) -> bool:
        return self.table.waiting(request)

    def allocated(self, request: int, match: Match, load: range, blocks: Sequence[int]) -> None:
        self._deadlines.pop(request, None)
        if load:
            self._lead(request, load, self._names[request][load.start : load.stop], self._clock.now)

    def output(self, ended: Iterable[int], tick: bool) -> tuple[list[int], list[int], list[int]]:
        self._end_loads(ended)
        if tick:
            self._expire()
        free, self._free = self._free, []
        return sorted(ended), [], free

    def finished(self, request: int) -> None:
        super().finished(request)
        self._deadlines.pop(request, None)

    def _known_answer(self, request: int, local: int) -> Match | None:
        known = super()._known_answer(request, local)
        if known is None and request in self._served:
            self._served.discard(request)
            if local >= self._asked[request]:
                return Match(0)
        return known

    def _may_join(self, request: int, now: float) -> bool:
        return now < self._deadlines.get(request, math.inf) and super()._may_join(request, now)

    def _join(self, request: int, segments: list[Segment], shared: int, own: int, now: float) -> Match | None:
        self._store.withdraw(request)
        if request not in self._deadlines:
            size = sum(len(flight.hashes) for flight in {segment.flight for segment in segments})
            self._deadlines[request] = now + self.table.budget_s(size)
        self.table.attach(request, segments, now, deadline=self._deadlines[request])
        return ASK_AGAIN

    def _left(self, request: int, outcome: Outcome) -> None:
        self._free.append(request)
        if outcome is Outcome.READY:
            self._served.add(request)


RULES: dict[Mode, type[Attach] | type[Park]] = {"attach": Attach, "park": Park}
