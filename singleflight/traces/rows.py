"""One row of a trace, whatever file it was in, to a checked `Request`, and back. What differs between
formats is data (`Format`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from singleflight.files import shown
from singleflight.traces import observed
from singleflight.traces.errors import BadLine, Fraction, kind, show
from singleflight.traces.request import MAX_HASH, MAX_TIMESTAMP_MS, MAX_TOKENS, Lengths, Request
from singleflight.traces.sessions import Sessions

Unit = Literal["ms", "s"]

PROMPTS = ("messages", "text_input", "payload")
"""What stands in rows of aiperf's that have the prompt itself, and so no hash ids."""
DELTAS = ("delta", "parent_id")
"""Fields of delta variants of Mooncake JSONL, whose rows carry only the new part of a prompt."""


@dataclass(frozen=True)
class Format:
    """A trace format.

    Attributes:
        name: as `--format` takes it.
        unit: what its timestamps count, declared by the format.
        block_size: tokens a hash id covers, declared by the format.
        required: fields every row has.
        optional: field -> the check its value must pass, or null; `output_length` is checked as a length.
        foreign: fields that tell the row for another format's.
        needs_output: whether every row that is written has an output length.
        encode: (index in the trace, request, unit) -> the row to write, JSON.
    """

    name: str
    unit: Unit
    block_size: int
    required: tuple[str, ...]
    optional: dict[str, Callable[[Any], bool]]
    foreign: tuple[str, ...]
    needs_output: bool
    encode: Callable[[int, Request, Unit], str]


@dataclass(frozen=True)
class Reading:
    """How to take rows: of which format, what a timestamp counts, how many tokens a hash id covers.

    Attributes:
        fractions: the user has said the unit, so that a fraction of a millisecond is no misunderstanding.
        strict: unknown fields are an error, instead of being left alone.
    """

    form: Format
    unit: Unit
    block_size: int
    fractions: bool = False
    strict: bool = False

    @property
    def fields(self) -> str:
        """For messages."""
        return f"{self.form.name} rows with " + ", ".join(
            (*self.form.required, *(f"[{name}]" for name in self.form.optional))
        )


def parse_request(row: dict[str, Any], how: Reading, sessions: Sessions) -> tuple[Request, list[str]]:
    """Check one row against its format.

    Args:
        sessions: of the rows before it; learns of this one.

    Returns:
        The request, and the names of fields that were left alone.

    Raises:
        BadLine: a missing field, a wrong type, a value out of range, or a row that is not a whole prompt at
            a time of its own.
    """
    form = how.form
    odd = sessions.objection(row)
    if len(row) > len(form.required) or odd:
        _refuse_other_kinds(row, how)
    if odd:
        raise odd
    for name in form.required:
        if name not in row:
            raise BadLine(f"field {name!r} is missing", how.fields)
    ignored = []
    if len(row) > len(form.required):
        for name, value in row.items():
            if name in form.required:
                continue
            check = form.optional.get(name)
            if check is None:
                if how.strict:
                    raise BadLine(f"unknown field {shown.text(name)!r}", how.fields)
                ignored.append(name)
            elif value is not None and not check(value):
                raise BadLine(f"{name} is {show(value)}", f"a {form.name} {name}")
    tokens = _whole(row, "input_length", 1, MAX_TOKENS)
    output = None if row.get("output_length") is None else _whole(row, "output_length", 0, MAX_TOKENS)
    hashes = row["hash_ids"]
    if type(hashes) is not list:
        raise BadLine(f"hash_ids is a JSON {kind(hashes)}", "an array of whole numbers")
    if not hashes:
        raise BadLine("hash_ids is empty", "at least one hash id a request")
    if {*map(type, hashes)} != {int}:
        first = next(each for each in hashes if type(each) is not int)
        raise BadLine(
            f"hash_ids holds {show(first)}, a JSON {kind(first)}", "whole numbers from 0 to 2**64 - 1"
        )
    if min(hashes) < 0 or max(hashes) > MAX_HASH:
        first = min(hashes) if min(hashes) < 0 else max(hashes)
        raise BadLine(f"hash_ids holds {show(first)}", "whole numbers from 0 to 2**64 - 1")
    needed = -(-tokens // how.block_size)
    if len(hashes) != needed:
        raise BadLine(
            f"{len(hashes)} hash ids for input_length {tokens}",
            f"ceil(input_length / {how.block_size}) = {needed} ids, or another --block-size",
        )
    seen = observed.parse(row.get(observed.FIELD)) if observed.FIELD in form.optional else None
    return Request(_timestamp(row["timestamp"], how), hashes, Lengths(tokens, output), seen), ignored


def _refuse_other_kinds(row: dict[str, Any], how: Reading) -> None:
    for name in how.form.foreign:
        if name in row:
            raise BadLine(f"unknown field {name!r}", how.fields)
    for name in DELTAS:
        if name in row:
            raise BadLine(f"field {name!r}: a delta trace, whose rows are not whole prompts", how.fields)
    for name in PROMPTS:
        if row.get(name) is not None and row.get("hash_ids") is None:
            raise BadLine(f"has {name!r}, the prompt itself, and no hash_ids", how.fields)


def timestamp_of(row: dict[str, Any]) -> float | None:
    """The number that stands as a timestamp, whatever it counts; None if none does."""
    value: Any = row.get("timestamp")
    if type(value) in (int, Decimal) and 0 <= value <= MAX_TIMESTAMP_MS:
        return float(value)
    return None


def _timestamp(value: Any, how: Reading) -> int:
    if how.unit == "ms":
        if type(value) is Decimal and value == value:
            if not how.fractions:
                raise Fraction(f"timestamp is {show(value)}, a JSON fraction")
        elif type(value) is not int:
            raise BadLine(
                f"timestamp is {show(value)}, a JSON {kind(value)}",
                "whole milliseconds (or --unit s for seconds)",
            )
        if not 0 <= value <= MAX_TIMESTAMP_MS:
            raise BadLine(f"timestamp is {show(value)}", "0 to 2**53 ms")
        whole: int = math.floor(value)
        return whole
    if type(value) not in (int, Decimal):
        raise BadLine(f"timestamp is {show(value)}, a JSON {kind(value)}", "seconds as a number")
    if not 0 <= value <= MAX_TIMESTAMP_MS // 1000:
        raise BadLine(f"timestamp is {show(value)}", "0 to 2**53 / 1000 seconds")
    ms: int = round(value * 1000)
    return ms


def seconds(timestamp_ms: int) -> str:
    """Milliseconds as a JSON number of seconds, exactly."""
    return f"{timestamp_ms // 1000}.{timestamp_ms % 1000:03d}"


def time_in(timestamp_ms: int, unit: Unit) -> str:
    """A timestamp as the JSON number of `unit`."""
    return str(timestamp_ms) if unit == "ms" else seconds(timestamp_ms)


def is_text(value: Any) -> bool:
    """A check for `Format.optional`."""
    return type(value) is str


def anything(value: Any) -> bool:
    """A check for `Format.optional`: what it means is looked at elsewhere."""
    return True


def _whole(row: dict[str, Any], name: str, low: int, high: int) -> int:
    value = row[name]
    if type(value) is not int:
        raise BadLine(f"{name} is {show(value)}, a JSON {kind(value)}", f"a whole number from {low} to 2**40")
    if not low <= value <= high:
        raise BadLine(f"{name} is {show(value)}", f"a whole number from {low} to 2**40")
    return value
