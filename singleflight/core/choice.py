"""Load a prefix, or compute it? Link and accelerator are two machines: a request goes where it is done first.

Expected times in, an answer out. What is expected comes from `receive.py` and `prefill.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .policy import Policy


class Chosen(Enum):
    """What a request does about a prefix that it lacks and the store has. Closed: metrics list these."""

    JOIN = "join"
    """It waits for another's load."""
    LOAD = "load"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds from now to the request's first token, by what it does; None: not known."""

    load_s: float | None
    """With what is queued on the link before it, and with what it computes in either case."""
    compute_s: float | None
    """With the prefills before it."""
    own_s: float = 0.0
    """Of `compute_s`, what its own prefill takes."""
    others_s: float = 0.0
    """What its computing would cost others, together: those whose loads land meanwhile wait for its end."""
    decodes: int = 0
    """Requests that decode now."""

    @property
    def turn_s(self) -> float:
        """Until when it may let others go first, if it computes: half of what it gains is left then."""
        if self.load_s is None or self.compute_s is None:
            return 0.0
        return self.compute_s - self.own_s + (self.load_s - self.compute_s) / 2

    @property
    def lost_s(self) -> float:
        """From when on it would have its first token later than by its load."""
        if self.load_s is None:
            return 0.0
        return self.load_s - self.own_s

    def chosen(self, policy: Policy, budget: int) -> Chosen:
        """Load or compute, where a step has at most `budget` tokens.

        What is not known is loaded, as without this rule. Nobody computes while more than a share of the
        budget decodes; nor for a small gain; nor where others lose more than it gains.
        """
        if self.load_s is None or self.compute_s is None:
            return Chosen.LOAD
        if self.decodes > policy.compute_decode_share * budget:
            return Chosen.LOAD
        faster = self.load_s > policy.compute_patience * self.compute_s
        worth = self.load_s - self.compute_s > self.others_s
        return Chosen.COMPUTE if faster and worth else Chosen.LOAD

    def __str__(self) -> str:
        load, compute = ("unknown" if s is None else f"{s:.3f} s" for s in (self.load_s, self.compute_s))
        return f"load {load}, compute {compute}, others lose {self.others_s:.3f} s, {self.decodes} decode"
