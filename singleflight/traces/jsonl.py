"""One JSON-lines record: bytes to a checked `Request`, and back. What differs between formats is data
(`Format`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, NoReturn

from singleflight.traces.errors import BadLine
from singleflight.traces.request import MAX_HASH, MAX_TIMESTAMP_MS, MAX_TOKENS, Lengths, Request

Unit = Literal["ms", "s"]

BOM = b"\xef\xbb\xbf"
DELTA_FIELDS = {"session_id", "delay", "delta", "parent_id", "messages", "text_input"}
"""Fields of the session and delta variants of Mooncake JSONL, whose rows carry only the new part of a
prompt."""


@dataclass(frozen=True)
class Format:
    """A JSON-lines trace format.

    Attributes:
        name: as `--format` takes it.
        unit: what its timestamps count, declared by the format.
        block_size: tokens a hash id covers, declared by the format.
        required: fields every row has.
        optional: field -> the check its value must pass; their content is not used.
        encode: (index in the trace, request, unit) -> the row to write.
    """

    name: str
    unit: Unit
    block_size: int
    required: tuple[str, ...]
    optional: dict[str, Callable[[Any], bool]]
    encode: Callable[[int, Request, Unit], str]


def parse_object(raw: bytes) -> dict[str, Any]:
    """One physical line, without its newline, as a JSON object.

    Raises:
        BadLine: not exactly one JSON object in plain UTF-8; every way a line can be dirty ends here.
    """
    accepted = "one JSON object a line"
    if raw.startswith(BOM):
        raise BadLine("starts with a byte order mark (BOM)", "UTF-8 without BOM")
    if b"\0" in raw:
        raise BadLine("has NUL bytes (a binary file, or a hole in it)", accepted)
    if raw.endswith(b"\r"):
        raise BadLine("ends in CR LF", "lines that end in LF alone")
    if not raw.strip():
        raise BadLine("is blank", accepted)
    try:
        row = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_constant=_not_a_number, parse_float=Decimal
        )
    except UnicodeDecodeError as fault:
        raise BadLine(f"is not UTF-8 (byte {fault.start})", f"{accepted}, UTF-8") from None
    except json.JSONDecodeError as fault:
        raise BadLine(f"malformed JSON: {fault.msg} at column {fault.colno}", accepted) from None
    except RecursionError:
        raise BadLine("JSON nested too deeply", accepted) from None
    except BadLine:
        raise
    except (ValueError, ArithmeticError):  # digits without end: int() and Decimal() have limits
        raise BadLine("has a number that is out of all range", "numbers of at most 20 digits") from None
    if type(row) is not dict:
        raise BadLine(f"is a JSON {_kind(row)}", accepted)
    return row


def parse_request(row: dict[str, Any], form: Format, unit: Unit, block_size: int) -> Request:
    """Check one row against its format.

    Args:
        unit, block_size: the format's, or what the user declared instead.

    Raises:
        BadLine: a missing or unknown field, a wrong type, or a value out of range.
    """
    fields = ", ".join((*form.required, *(f"[{name}]" for name in form.optional)))
    for name in form.required:
        if name not in row:
            raise BadLine(f"field {name!r} is missing", f"{form.name} rows with {fields}")
    if len(row) > len(form.required):
        for name, value in row.items():
            if name in form.required:
                continue
            if name in DELTA_FIELDS and name not in form.optional:
                raise BadLine(
                    f"field {name!r}: a session or delta trace, whose rows are not whole prompts",
                    f"{form.name} rows with {fields}",
                )
            check = form.optional.get(name)
            if check is None:
                raise BadLine(f"unknown field {name!r}", f"{form.name} rows with {fields}")
            if not check(value):
                raise BadLine(f"{name} is {_show(value)}", f"a {form.name} {name}")
    tokens = _whole(row, "input_length", 1, MAX_TOKENS)
    lengths = Lengths(tokens, _whole(row, "output_length", 0, MAX_TOKENS))
    hashes = row["hash_ids"]
    if type(hashes) is not list:
        raise BadLine(f"hash_ids is a JSON {_kind(hashes)}", "an array of whole numbers")
    if not hashes:
        raise BadLine("hash_ids is empty", "at least one hash id a request")
    if {*map(type, hashes)} != {int}:
        odd = next(each for each in hashes if type(each) is not int)
        raise BadLine(
            f"hash_ids holds {_show(odd)}, a JSON {_kind(odd)}", "whole numbers from 0 to 2**64 - 1"
        )
    if min(hashes) < 0 or max(hashes) > MAX_HASH:
        odd = min(hashes) if min(hashes) < 0 else max(hashes)
        raise BadLine(f"hash_ids holds {_show(odd)}", "whole numbers from 0 to 2**64 - 1")
    if len(hashes) != -(-tokens // block_size):
        raise BadLine(
            f"{len(hashes)} hash ids for input_length {tokens}",
            f"ceil(input_length / {block_size}) = {-(-tokens // block_size)} ids, or another --block-size",
        )
    return Request(_timestamp(row["timestamp"], unit), hashes, lengths)


def _timestamp(value: Any, unit: Unit) -> int:
    if unit == "ms":
        if type(value) is not int:
            raise BadLine(
                f"timestamp is {_show(value)}, a JSON {_kind(value)}",
                "whole milliseconds (or --unit s for seconds)",
            )
        if not 0 <= value <= MAX_TIMESTAMP_MS:
            raise BadLine(f"timestamp is {_show(value)}", "0 to 2**53 ms")
        return value
    if type(value) not in (int, Decimal):
        raise BadLine(f"timestamp is {_show(value)}, a JSON {_kind(value)}", "seconds as a number")
    if not 0 <= value <= MAX_TIMESTAMP_MS // 1000:
        raise BadLine(f"timestamp is {_show(value)}", "0 to 2**53 / 1000 seconds")
    ms: int = round(value * 1000)
    return ms


def seconds(timestamp_ms: int) -> str:
    """Milliseconds as a JSON number of seconds, exactly."""
    return f"{timestamp_ms // 1000}.{timestamp_ms % 1000:03d}"


def time_in(timestamp_ms: int, unit: Unit) -> str:
    """A timestamp as the JSON number of `unit`."""
    return str(timestamp_ms) if unit == "ms" else seconds(timestamp_ms)


def _whole(row: dict[str, Any], name: str, low: int, high: int) -> int:
    value = row[name]
    if type(value) is not int:
        raise BadLine(
            f"{name} is {_show(value)}, a JSON {_kind(value)}", f"a whole number from {low} to 2**40"
        )
    if not low <= value <= high:
        raise BadLine(f"{name} is {_show(value)}", f"a whole number from {low} to 2**40")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadLine(f"field {_show(twice)} appears twice", "each field once")
    return row


def _not_a_number(name: str) -> NoReturn:
    raise BadLine(f"has {name}, which is not JSON", "finite numbers")


def _kind(value: Any) -> str:
    kinds = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "integer",
        Decimal: "fraction",
    }
    return kinds.get(type(value), "null")


def _show(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a number of over 77 digits"  # str() of a huge int is slow, and refused beyond a limit
    text = (
        str(value)
        if isinstance(value, (int, Decimal)) and not isinstance(value, bool)
        else json.dumps(value, default=str)
    )
    return text if len(text) <= 60 else text[:57] + "..."
