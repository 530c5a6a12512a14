"""The field `observed` of a recording's rows: what became of a request, without content."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from singleflight.traces.errors import BadLine, kind, show
from singleflight.traces.request import MAX_TIMESTAMP_MS, MAX_TOKENS, Observed

FIELD = "observed"
_COUNTS = frozenset({"loaded_blocks", "prefill_tokens"})


def encode(of: Observed) -> str:
    """As JSON, without what was not seen."""
    return json.dumps({name: value for name, value in of._asdict().items() if value is not None})


def parse(value: Any) -> Observed | None:
    """The value of the field. Names that a newer recorder has added are left alone.

    Raises:
        BadLine: it is no object, or a time or count in it is none.
    """
    if value is None:
        return None
    if type(value) is not dict:
        raise BadLine(f"{FIELD} is a JSON {kind(value)}", "an object, as the recorder writes it")
    found: dict[str, Any] = {}
    for name in Observed._fields:
        if (each := value.get(name)) is None:
            continue
        whole, most = name in _COUNTS, MAX_TOKENS if name in _COUNTS else MAX_TIMESTAMP_MS
        if type(each) not in ((int,) if whole else (int, Decimal)) or not 0 <= each <= most:
            what = "a whole number from 0 to 2**40" if whole else "milliseconds from 0 to 2**53"
            raise BadLine(f"{FIELD}.{name} is {show(each)}", what)
        found[name] = each if whole else float(each)
    return Observed(**found)
