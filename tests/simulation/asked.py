"""A request, as its client sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .content import session


@dataclass
class Asked:
    """What a client has asked for, and what it has heard so far.

    A request that is fed in chunks (vLLM's streaming input, `Request(resumable=True)`) can have more than one
    entry in `chunks`. It ends when it is `closed` and all of them have been answered.
    """

    chunks: list[tuple[list[int], int]]
    """Prompt tokens, and how many tokens it wants after them."""
    salt: str | None
    closed: bool = True
    """There are no more chunks to come."""
    said: list[int] = field(default_factory=list)
    answered: int = 0
    """Chunks that are complete."""
    ended: str | None = None
    """How it has ended: length, abort or error."""

    @property
    def right(self) -> list[int]:
        """What it is to say."""
        return session(self.chunks, self.salt)

    def hear(self, tokens: list[int], finish_reason: str | None) -> bool:
        """An output; returns whether the request has ended, which it had not before."""
        self.said += tokens
        if finish_reason is None:
            return False
        self.answered += 1
        if finish_reason == "length" and not (self.closed and self.answered == len(self.chunks)):
            return False
        ended_now = self.ended is None
        self.ended = self.ended or finish_reason
        return ended_now
