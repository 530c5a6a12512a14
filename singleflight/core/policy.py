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
    a long load is not mistaken for a dead one: a 2 MiB block (16 tokens of an 8B model) at 40 MB/s. At
    least 0. The connector sets it from its `deadline_per_token_s`; for the async driver, a block is a key."""

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

    compute_patience: float = 1.25
    """The connector, with `load_or_compute`: a request computes what the store has only if that is expected
    to be more than so many times faster than its load. A load's report comes with the end of a step and a
    prefill's speed is that of other prompts, so both are known to about a quarter; and what is computed is
    taken from others. More than 1: compute less often."""

    compute_decode_share: float = 0.001
    """The connector, with `load_or_compute`: nobody computes what the store has while more requests decode
    than this share of a step's token budget: each of them would wait for each step of the prefill. 8 of
    8,192: below that, a prefill that nobody had to do is not what the p99 of token times is made of."""

    broken_ttl_s: float = 30.0
    """The connector: seconds for which a block that could not be read is not asked for again. Two Gets and
    time-outs a minute, not one a request. Nobody overwrites such a key while the store says that it exists,
    and what is computed meanwhile is in the local cache. Not longer, since what failed may have been the
    link, and then the key is readable again at once. 0: never remembered."""

    breaker_failures: int = 5
    """The connector: after so many loads in a row that fail or are overdue, requests wait for no others'
    loads for a while. One broken key can fail two flights of a cohort; five without one that lands between
    them are the store's path. 0: never."""

    breaker_pause_s: float = 30.0
    """Seconds of that. A store node restarts in about that time, and until it has, one cohort each half
    minute waits for its deadline of 10 s, not every one."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(field.default, int)
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
