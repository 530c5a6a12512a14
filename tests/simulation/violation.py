"""What can be wrong with a run."""

from __future__ import annotations


class Failure(AssertionError):
    """Something is wrong; `known` names the bug of vLLM's or the stock connector's that explains it."""

    known: str | None = None


class Violation(Failure):
    """A wrong read, a wrong entry in the cache, a block given away too early, a wrong token, a leak."""


class Stuck(Failure):
    """Somebody is not served, however long we wait."""


class Crash(Failure):
    """An exception that would have ended the engine."""
