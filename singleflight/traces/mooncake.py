"""Mooncake JSONL: milliseconds, 512-token blocks (the FAST'25 trace release of kvcache-ai/Mooncake)."""

from __future__ import annotations

from singleflight.traces.jsonl import Format, Unit, time_in
from singleflight.traces.request import Request


def _encode(index: int, request: Request, unit: Unit) -> str:
    ids = ", ".join(map(str, request.hashes))
    return (
        f'{{"timestamp": {time_in(request.timestamp_ms, unit)}, "input_length": {request.lengths.input}, '
        f'"output_length": {request.lengths.output}, "hash_ids": [{ids}]}}'
    )


MOONCAKE = Format(
    name="mooncake",
    unit="ms",
    block_size=512,
    required=("timestamp", "input_length", "output_length", "hash_ids"),
    optional={},
    encode=_encode,
)
