"""Qwen-Bailian JSONL: seconds, 16-token blocks, chat ids (alibaba-edu/qwen-bailian-usagetraces-anon).

Every row carries its whole prompt, so the chat fields are checked and not used: order is by timestamp alone.
"""

from __future__ import annotations

from typing import Any

from singleflight.traces.request import Request
from singleflight.traces.rows import Format, Unit, anything, is_text, time_in


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_turn(value: Any) -> bool:
    return type(value) is int and value >= 1


def _encode(index: int, request: Request, unit: Unit) -> str:
    ids = ", ".join(map(str, request.hashes))
    return (
        f'{{"chat_id": {index}, "parent_chat_id": -1, "timestamp": {time_in(request.timestamp_ms, unit)}, '
        f'"input_length": {request.lengths.input}, "output_length": {request.lengths.output}, '
        f'"type": "text", "turn": 1, "hash_ids": [{ids}]}}'
    )


BAILIAN = Format(
    name="qwen-bailian",
    unit="s",
    block_size=16,
    required=("chat_id", "timestamp", "input_length", "hash_ids"),
    optional={"output_length": anything, "parent_chat_id": _is_int, "type": is_text, "turn": _is_turn},
    foreign=(),
    needs_output=True,
    encode=_encode,
)
