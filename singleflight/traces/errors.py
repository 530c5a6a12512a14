"""The one exception a trace reader may raise for what is in (or behind) a file, and how it shows values."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from singleflight.files import shown


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
        where = shown.path(source) if line is None else f"{shown.path(source)}:{line}"
        super().__init__(f"{where}: {wrong}; accepted: {accepted}")


class BadLine(ValueError):
    """One line is bad, said by a format that does not know the file or the line number (the reader adds
    both)."""

    def __init__(self, wrong: str, accepted: str) -> None:
        self.wrong = wrong
        self.accepted = accepted
        super().__init__(f"{wrong}; accepted: {accepted}")


class Fraction(BadLine):
    """A timestamp with a fraction, where whole milliseconds are declared: it may count seconds or
    milliseconds, and only the user knows. The reader adds what either would come to."""

    def __init__(self, wrong: str) -> None:
        super().__init__(wrong, "whole milliseconds, or --unit s or --unit ms for fractions of either")


def kind(value: Any) -> str:
    """The name of a value's JSON type, for messages."""
    kinds = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "integer",
        Decimal: "fraction",
        type(None): "null",
    }
    return kinds.get(type(value), type(value).__name__)  # the latter of Parquet alone


def show(value: Any) -> str:
    """A value for a message, cut off."""
    return str(value)[:60] if type(value) is Decimal else shown.as_json(value)
