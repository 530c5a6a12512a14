"""Rows of a multi-turn session, as aiperf writes them into Mooncake JSONL (`session_id`, `delay`).

Its documentation (conversation context modes, trace replay): rows of one session are its turns. Unless they
say `"context_mode": "message_array_with_responses"`, a turn after the first holds what is new; what is sent
is all turns before it, the answers that the server gave to them, and that. Those answers are in no file, so
neither is the prompt. A row with `delay` instead of `timestamp` was sent that many ms after the answer before
it had ended, and that is in no file either.
"""

from __future__ import annotations

from typing import Any

from singleflight.files import shown
from singleflight.traces.errors import BadLine

WHOLE = "message_array_with_responses"
FIELDS = ("session_id", "delay", "context_mode")


class Sessions:
    """The sessions of the rows seen so far, in file order."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def objection(self, row: dict[str, Any]) -> BadLine | None:
        """Why this row cannot be read by itself; None if it can. It counts as seen either way."""
        if not any(field in row for field in FIELDS):
            return None
        session, delay = row.get("session_id"), row.get("delay")
        if session is not None and type(session) is not str:
            return BadLine(f"session_id is {shown.as_json(session)}", "a text")
        later = session in self._begun
        if session is not None:
            self._begun.add(session)
        if row.get("timestamp") is None and delay is not None:
            return BadLine(
                f"has a delay ({shown.as_json(delay)}) and no timestamp: it was sent so long after the answer"
                " to the turn before it, and no trace says when that ended",
                "rows with a timestamp",
            )
        if delay:
            return BadLine("has a timestamp and a delay, which are two times", "rows with a timestamp alone")
        if later and row.get("context_mode") != WHOLE:
            return BadLine(
                f"is a later turn of session {shown.as_json(session)}: such a row holds only what is new in"
                " the prompt, and the answers that stand before that are in no trace",
                f'whole prompts, which rows declare with "context_mode": "{WHOLE}"',
            )
        return None
