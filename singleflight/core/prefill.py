"""How fast the accelerator computes prompts, learned from the steps of an engine. No clock.

    seconds = seconds a token x tokens  +  seconds a pair x (token, token before it that it attends to)

Decodes beside a prefill take what a step of decodes alone takes; that is learned apart, and taken off.
"""

from __future__ import annotations

from typing import NamedTuple

from .fit import ENOUGH, WINDOW, Plane

SUBSTANTIAL = 256
"""Prompt tokens from which on a step says something about prefill; below, an accelerator takes about as long
for one as for all. (Or a quarter of the token budget, where that is less.)"""

REACH = 2.0
"""Nothing is said about prompts that end beyond so many times the longest one computed so far."""


class Work(NamedTuple):
    """Prompt tokens to compute."""

    tokens: int
    pairs: float = 0.0
    """Pairs of a token and one before it."""
    end: int = 0
    """Tokens of the longest of these prompts up to the last that is computed."""

    @classmethod
    def of(cls, first: int, tokens: int) -> Work:
        """So many tokens of a prompt from its token `first` on."""
        return cls(tokens, tokens * (first + tokens / 2), first + tokens)

    def beside(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs, max(self.end, other.end))


class PrefillSpeed:
    """Expected seconds of prefills on an engine that computes at most `budget` tokens a step."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.substantial = min(SUBSTANTIAL, max(budget // 4, 2))
        self._prices = Plane()
        self._longest = 0
        self._decode_s = 0.0  # a step that only decodes
        self._decode_steps = 0

    def observe(self, work: Work, decodes: int, seconds: float) -> None:
        """A step has computed this beside so many decodes, and took so long."""
        if not work.tokens:
            if decodes:
                self._decode_steps += 1
                self._decode_s += (seconds - self._decode_s) / min(self._decode_steps, WINDOW)
            return
        if work.tokens < self.substantial or (decodes and self._decode_steps < ENOUGH):
            return
        alone = max(seconds - self._decode_s, 0.0) if decodes else seconds
        self._prices.observe(work.tokens, work.pairs, alone)
        self._longest = max(self._longest, work.end)

    def at_least_s(self, tokens: int) -> float | None:
        """No prefill of so many tokens should take less; None while too little is known."""
        return self._prices.seconds(tokens, 0.0)

    def seconds(self, work: Work, decodes: int = 0) -> float | None:
        """What this should take beside so many decodes; None while too little is known."""
        if work.end > REACH * self._longest:
            return None
        alone = self._prices.seconds(work.tokens, work.pairs)
        if alone is None or not decodes:
            return alone
        return alone + -(-work.tokens // self.budget) * self._decode_s
