"""The one exception a trace reader may raise for what is in (or behind) a file."""

from __future__ import annotations


class TraceError(ValueError):
    """A trace that cannot be used: where, what is wrong, and what would have been accepted.

    Attributes:
        source: the path as the user gave it, or ``-`` for standard input.
        line: physical line number from 1, or None when the fault is of the file and not of a line.
        wrong: what is wrong, a clause without a final stop.
        accepted: what is accepted instead.

    ``str()`` gives ``source:line: wrong; accepted: …``, the form of compiler messages, so that editors can
    jump to it.
    """

    def __init__(self, source: str, line: int | None, wrong: str, accepted: str) -> None:
        self.source = source
        self.line = line
        self.wrong = wrong
        self.accepted = accepted
        where = source if line is None else f"{source}:{line}"
        super().__init__(f"{where}: {wrong}; accepted: {accepted}")


class BadLine(ValueError):
    """One line is bad, said by a format that does not know the file or the line number (the reader adds
    both)."""

    def __init__(self, wrong: str, accepted: str) -> None:
        self.wrong = wrong
        self.accepted = accepted
        super().__init__(f"{wrong}; accepted: {accepted}")
