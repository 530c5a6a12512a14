"""One line of a JSON-lines trace, bytes to a JSON object; every way a line can be dirty ends here."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NoReturn

from singleflight.traces.errors import BadLine, kind, show

BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")


def parse_object(raw: bytes) -> dict[str, Any]:
    """One physical line, without its newline, as a JSON object.

    Raises:
        BadLine: not exactly one JSON object in plain UTF-8; every way a line can be dirty ends here.
    """
    accepted = "one JSON object a line"
    if raw.startswith(BOM):
        raise BadLine("starts with a byte order mark (BOM)", "UTF-8 without BOM")
    if raw.startswith(UTF16):
        raise BadLine("is UTF-16, so it has NUL bytes", f"{accepted}, UTF-8 without byte order mark")
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
        raise BadLine(f"is a JSON {kind(row)}", accepted)
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadLine(f"field {show(twice)} appears twice", "each field once")
    return row


def _not_a_number(name: str) -> NoReturn:
    raise BadLine(f"has {name}, which is not JSON", "finite numbers")
