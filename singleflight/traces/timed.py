"""JSONL for `vllm bench serve --dataset-name timed_trace`, to write; it reads back as `mooncake --unit s`.

The format is what vLLM 0.32's `benchmarks.datasets.TimedTrace` takes without further options: seconds, and 16
tokens a hash id. It wants an output length in every row, and sends it as the number of tokens to generate,
of which there must be one.
"""

from __future__ import annotations

from dataclasses import replace

from singleflight.traces.mooncake import MOONCAKE
from singleflight.traces.request import Request
from singleflight.traces.rows import Unit


def _encode(index: int, request: Request, unit: Unit) -> str:
    lengths = request.lengths._replace(output=max(1, request.lengths.output or 0))
    return MOONCAKE.encode(index, request._replace(lengths=lengths, observed=None), unit)


TIMED = replace(MOONCAKE, name="timed", unit="s", block_size=16, needs_output=True, encode=_encode)


def options(block_size: int, unit: Unit, requests: int) -> str:
    """What `vllm bench serve` is to be told about such a file."""
    told = f"--dataset-name timed_trace --num-prompts {requests}"
    if block_size != TIMED.block_size:
        told += f" --timed-trace-chunk-hash-size {block_size}"
    return told + (" --timed-trace-sec-multiplier 0.001" if unit == "ms" else "")
