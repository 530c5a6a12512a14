"""A short load that moves every metric of both modes: bursts of requests for a prefix only the store has."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.ab.servers import Server
from singleflight.gate.verdict import Gain, Prediction, Range, Scope, Trace, Verdict

BLOCK = 32
PREFIX_BLOCKS = (16, 32, 64)
FAN_INS = (8, 4, 12)
"""Sizes of the bursts, in turn."""


def predicted() -> float:
    """Share of block loads that one flight for each burst removes, if every burst overlaps."""
    bursts = list(zip(PREFIX_BLOCKS, FAN_INS, strict=True))
    asked = sum(blocks * members for blocks, members in bursts)
    return sum(blocks * (members - 1) for blocks, members in bursts) / asked


def write_verdict(path: Path, model: Path) -> None:
    """A verdict as the gate would write it for this load; what it predicts is the load's own arithmetic."""
    asked = sum(FAN_INS)
    scope = Scope(
        traces=[Trace("the bursts of make watch", "0" * 64, asked, asked, 10.0)],
        steady_requests=asked,
        block_size_tokens=BLOCK,
        model=str(model),
        instances=1,
        routing="round_robin",
        capacity_blocks=8000,
        receive_threads=1,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        store="warm",
        scale=1.0,
        versions={},
    )
    nobody_asks = Prediction(0.0, 0.0, 0.0, 0, 0)
    everywhere = Range(1.0, 1.0, 1.0)
    Verdict(
        made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        enable=True,
        reasons=["The bursts overlap."],
        flips=[],
        ttft={"stock": nobody_asks, "attach": nobody_asks},
        gain=Gain(everywhere, everywhere, 0.0, 0.0),
        redundancy=predicted(),
        scope=scope,
        figures={},
    ).write(path)


def complete(server: Server, prompt: Sequence[int]) -> None:
    """One greedy request of four tokens. OSError if the server fails it."""
    body = {"model": str(server.model), "prompt": list(prompt), "max_tokens": 4, "temperature": 0}
    server.ask("/v1/completions", json.dumps({**body, "ignore_eos": True}).encode())


def burst(servers: Sequence[Server], turn: int) -> None:
    """Have a new prefix in the store and nowhere else; then ask each server for it several times at once."""
    blocks, fan_in = PREFIX_BLOCKS[turn % len(PREFIX_BLOCKS)], FAN_INS[turn % len(FAN_INS)]
    prefix = [3 + (37 * i + 911 * turn) % 2040 for i in range(BLOCK * blocks)]
    complete(servers[0], [*prefix, 4])
    servers[0].cold()
    with ThreadPoolExecutor(fan_in * len(servers)) as clients:
        asked = [
            clients.submit(complete, server, [*prefix, 50 + i]) for server in servers for i in range(fan_in)
        ]
        for answer in asked:
            answer.result()


def drive(servers: Sequence[Server], seconds: float) -> int:
    """Bursts, one after the other, for so long and until each size has come equally often; how many."""
    limit, turn = time.monotonic() + seconds, 0
    while time.monotonic() < limit or turn % len(FAN_INS):
        burst(servers, turn)
        turn += 1
    return turn
