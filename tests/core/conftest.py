"""A small world around the table: a clock that only tests move, and one way to lead and to join."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from singleflight.core.flight import Flight
from singleflight.core.policy import Policy
from singleflight.core.stats import Outcome, Reason
from singleflight.core.table import Left, PendingBlockTable, Segment

# Binary fractions, so that deadlines can be compared exactly.
POLICY = Policy(deadline_base_s=8.0, deadline_per_block_s=0.25, max_handovers=1, max_blocks=64)


class World:
    def __init__(self, policy: Policy = POLICY) -> None:
        self.table = PendingBlockTable(policy)
        self.stats = self.table.stats
        self.now = 100.0

    def lead(self, request: str, blocks: Sequence[object], **more: object) -> Flight | None:
        destination = [f"{request}:{index}" for index in range(len(blocks))]
        return self.table.lead(request, blocks, destination, self.now, **more)

    def run(self, blocks: Sequence[object], start: int = 0) -> list[Segment]:
        return self.table.run(blocks, start, len(blocks))

    def join(self, request: str, blocks: Sequence[object], start: int = 0) -> list[Segment]:
        segments = self.run(blocks, start)
        self.table.attach(request, segments, self.now)
        return segments

    def expire(self, after: float) -> list[object]:
        self.now += after
        return self.table.expire(self.now)

    def picture(self) -> str:
        """All that the table knows, as text; equal pictures mean that nothing has changed."""
        known = self.table._flights.values()
        return repr((vars(self.table), [[getattr(f, slot) for slot in Flight.__slots__] for f in known]))

    @contextmanager
    def refuses(self, says: str) -> Iterator[None]:
        """The call raises ValueError with these words, and changes nothing."""
        before = self.picture()
        with pytest.raises(ValueError, match=says):
            yield
        assert self.picture() == before

    def leftovers(self) -> list[str]:
        """Containers that are not empty."""
        return [n for n, v in vars(self.table).items() if isinstance(v, dict | list | set) and v]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def world_with():
    """A world with other limits."""

    def make(**limits: object) -> World:
        given = {name: getattr(POLICY, name) for name in Policy.__slots__} | limits
        return World(Policy(**given))

    return make


def _left(outcome: Outcome, reason: Reason | None = None):
    @pytest.fixture
    def effects():
        return lambda *requests: [Left(request, outcome, reason) for request in requests]

    return effects


ready = _left(Outcome.READY)
cancelled = _left(Outcome.CANCELLED)
leader_failed = _left(Outcome.FELL_BACK, Reason.LEADER_FAILED)
too_late = _left(Outcome.FELL_BACK, Reason.DEADLINE)
was_reset = _left(Outcome.FELL_BACK, Reason.RESET)
