"""What ended loads say about the store: which keys are broken, and whether waiting for others makes sense."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from singleflight.core.breaker import Breaker, State
from singleflight.core.broken import BrokenKeys

if TYPE_CHECKING:
    from singleflight.core.policy import Policy
    from singleflight.core.stats import Stats

# Under vllm's name, so that its logging configuration shows our lines.
logger = logging.getLogger(f"vllm.{__name__}")


class Health:
    """One per engine."""

    def __init__(self, policy: Policy, stats: Stats) -> None:
        self.broken = BrokenKeys(policy.broken_ttl_s)
        self.breaker = Breaker(policy.breaker_failures, policy.breaker_pause_s)
        self._stats = stats

    def waiting_pays(self, now: float) -> bool:
        """Whether requests may wait for others' loads."""
        if self.breaker.state is State.CLOSED:
            return True
        allows = self.breaker.allows(now)
        self._show()
        return allows

    def landed(self, hashes: Sequence[bytes], in_time: bool) -> None:
        """A load of these blocks is complete. One that was overdue has been counted as that."""
        self.broken.read(hashes)
        if in_time:
            self.breaker.landed()
            self._show()

    def unreadable(self, block_hash: bytes, now: float) -> None:
        """The store has answered a Get of exactly this block with a failure."""
        self.broken.failed([block_hash], now)
        self._stats.blocks_broken += 1

    def failed(self, in_time: bool, now: float) -> None:
        """A load has failed; one that was overdue has been counted as that."""
        if in_time:
            self._strike(now)

    def overdue(self, flights: int, now: float) -> None:
        """So many loads have just become overdue."""
        for _ in range(flights):
            self._strike(now)

    def _strike(self, now: float) -> None:
        self.breaker.failed(now)
        self._show()

    def _show(self) -> None:
        """The gauge, and a log line where it changes."""
        is_open = int(self.breaker.state is State.OPEN)
        if is_open == self._stats.breaker_open:
            return
        self._stats.breaker_open = is_open
        if is_open:
            logger.warning(
                "kv-singleflight: loads fail or are overdue, one after the other;"
                " for a while nobody waits for another's load."
            )
        else:
            logger.info("kv-singleflight: requests wait for others' loads again.")
