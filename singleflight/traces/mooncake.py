"""Mooncake JSONL: milliseconds, 512-token blocks (the FAST'25 trace release of kvcache-ai/Mooncake).

aiperf reads and writes the same rows with a few fields more; `sessions.py` has those of its sessions.
"""

from __future__ import annotations

from singleflight.traces import observed
from singleflight.traces.request import Request
from singleflight.traces.rows import Format, Unit, anything, time_in


def _encode(index: int, request: Request, unit: Unit) -> str:
    ids = ", ".join(map(str, request.hashes))
    output = f'"output_length": {request.lengths.output}, ' if request.lengths.output is not None else ""
    seen = f', "{observed.FIELD}": {observed.encode(request.observed)}' if request.observed else ""
    return (
        f'{{"timestamp": {time_in(request.timestamp_ms, unit)}, "input_length": {request.lengths.input}, '
        f'{output}"hash_ids": [{ids}]{seen}}}'
    )


MOONCAKE = Format(
    name="mooncake",
    unit="ms",
    block_size=512,
    required=("timestamp", "input_length", "hash_ids"),
    optional=dict.fromkeys(
        ("output_length", "session_id", "delay", "context_mode", observed.FIELD), anything
    ),
    foreign=("chat_id",),
    needs_output=False,
    encode=_encode,
)
