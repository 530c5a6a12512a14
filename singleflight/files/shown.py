"""Content of files and configurations in sentences: bounded, on one line, whatever it is.

`json.dumps` and `repr` are not: both recurse as deep as the value is nested, both refuse integers of more
than 4,300 digits, and neither has an end.
"""

from __future__ import annotations

import json
import reprlib
from decimal import Decimal
from typing import Any

LONGEST = 60
"""Characters of a value or a key."""
LONGEST_PATH = 300

_ITEMS, _DEPTH = 6, 3
_HUGE_BITS = 256
"""Integers above this are not written out: str() of a huge one is slow."""


def as_json(value: Any) -> str:
    """A value as the JSON it came from, cut off."""
    return _cut(json.dumps(_pruned(value, _DEPTH), default=_number), LONGEST)


def as_python(value: Any) -> str:
    """A value as Python writes it, cut off."""
    return _cut(_python.repr(value), LONGEST)


def text(value: object, longest: int = LONGEST) -> str:
    """Text without quotes: a key, a name, a reason. What does not print, and lone surrogates, are escaped."""
    raw = str(value)[: longest + 1]
    return _cut("".join(c if c.isprintable() else ascii(c)[1:-1] for c in raw), longest)


def path(value: object) -> str:
    """A file's name. A very long one loses its middle, not its end."""
    raw = str(value)
    if len(raw) > LONGEST_PATH:
        half = LONGEST_PATH // 2
        raw = f"{raw[:half]}...{raw[-half:]}"
    return text(raw, 10 * LONGEST_PATH)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else str(value)[:LONGEST]


def _cut(string: str, longest: int) -> str:
    return string if len(string) <= longest else f"{string[: longest - 3]}..."


def _pruned(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value[: LONGEST + 1]
    if isinstance(value, int) and value.bit_length() > _HUGE_BITS:
        return "a number of over 77 digits"
    if isinstance(value, list):
        return [_pruned(each, depth - 1) for each in value[:_ITEMS]] if depth else "..."
    if isinstance(value, dict):
        if not depth:
            return "..."
        few = [key for key, _ in zip(value, range(_ITEMS), strict=False)]
        return {str(key)[: LONGEST + 1]: _pruned(value[key], depth - 1) for key in few}
    return value


class _Python(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = _DEPTH
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _ITEMS
        self.maxstring = self.maxlong = self.maxother = 2 * LONGEST

    def repr_int(self, value: int, level: int) -> str:
        return repr(value) if value.bit_length() <= _HUGE_BITS else "a number of over 77 digits"


_python = _Python()
