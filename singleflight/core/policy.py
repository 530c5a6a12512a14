"""Every default in one place, each with its reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Policy:
    """How long to wait, how often to try again, how much to remember.

    Raises ValueError, naming the field, for a value outside what its comment allows.
    """

    deadline_base_s: float = 10.0
    """Seconds a follower waits whatever the size. Far above any healthy load (a 4,096-token prefix over
    0.4 Gbit/s takes under a second), far below the 30 s and more after which clients give up (hazard C4).
    More than 0."""

    deadline_per_block_s: float = 0.05
    """Further seconds for each block of the flights it waits for, however few of them it adopts, so that
    a long load is not mistaken for a dead one: a 2 MiB block at 40 MB/s. At least 0."""

    deadline_learned_factor: float = 0.0
    """If above 0, wait at least this many times the longest load observed lately: for stores where loads
    queue for longer than the base. 0, since a deadline that is known beforehand is easier to trust."""

    max_handovers: int = 1
    """How often one request may lead or attach again after a flight it waited for has failed; then it
    goes alone. One try rescues a cohort from one bad leader; more would chase a broken key (hazard E7)."""

    max_blocks: int = 262_144
    """Pending blocks in the table; at the bound new flights are not registered and load as in stock
    vLLM (hazard J2). 262,144 blocks are 4 M tokens at 16 tokens a block, under 100 MB of table."""

    join_patience: float = 1.0
    """A request waits for others' flights only if they are expected to land within so many times what its own
    load would take; while too little is known it waits. 1: waiting must not lose. What is spared by waiting
    (a Get, GPU blocks) may be worth more than that to you. 0: always wait."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name.startswith("max_")
            ok = (
                isinstance(value, int if whole else (int, float))
                and not isinstance(value, bool)
                and abs(value) <= sys.float_info.max  # refuses NaN and infinities too
                and (value > 0 if field.name in ("deadline_base_s", "max_blocks") else value >= 0)
            )
            if not ok:
                kind = "a whole number" if whole else "a number"
                kind += " of seconds" if field.name.endswith("_s") else ""
                bound = "> 0" if field.name in ("deadline_base_s", "max_blocks") else ">= 0"
                raise ValueError(f"{field.name}: {value!r} is not accepted; give {kind} {bound}")

    def budget_s(self, blocks: int) -> float:
        """Seconds from attach to ready allowed for flights of `blocks` blocks together."""
        return self.deadline_base_s + self.deadline_per_block_s * blocks
