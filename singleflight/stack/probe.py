"""The probe: what N requests for one cold prefix cost, counted, with stock and with ours.

Deterministic, no timing: a barrier holds the first external Get until all N requests have been through
the scheduler, so that every one of them is a concurrent miss. The stock figures are asserted too: a probe
that cannot fail proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .arms import both
from .embedded import Stack

BLOCK_SIZE = 32
COUNTED = ("lookups", "load_specs", "queue_entries", "gets", "keys", "bytes", "addresses", "gpu_blocks")


@dataclass(frozen=True)
class Result:
    """Counts of one run; `bytes` are bytes, everything else is a number of things."""

    requests: int
    stock: dict[str, int]
    singleflight: dict[str, int]
    tokens_equal: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "stock": self.stock,
            "singleflight": self.singleflight,
            "tokens_equal": self.tokens_equal,
        }

    def problems(self) -> list[str]:
        """What is not as it should be, a sentence each; empty if the probe shows what it should.

        The prefix is one block, so N requests cost stock N of everything, and us one.
        """
        found = []
        block = self.singleflight["bytes"]
        for name in COUNTED:
            unit = block if name == "bytes" else 1
            for arm, counts, times in (
                ("stock", self.stock, self.requests),
                ("singleflight", self.singleflight, 1),
            ):
                if counts[name] != times * unit or unit == 0:
                    found.append(f"{arm} {name}: {counts[name]}, expected {times * unit}")
        if not self.tokens_equal:
            found.append("the two connectors did not generate the same tokens")
        return found


def prompts(requests: int) -> dict[str, list[int]]:
    """One block of common prefix, then a tail of each request's own, shorter than a block."""
    prefix = [3 + (7 * i) % 2000 for i in range(BLOCK_SIZE)]
    return {f"probe-{i}": [*prefix, *(100 + i for _ in range(8))] for i in range(requests)}


def run(requests: int, stack: Stack, say: Callable[[str], None]) -> Result:
    """Both arms on a running stack. EmbeddedError if an engine does not start or fails."""
    asked = prompts(requests)
    say("starting two engines")
    with both(stack) as arms:
        counts, tokens = [], []
        for arm in arms:
            say(f"{requests} requests through {arm.name}")
            arm.ask("fill", prompts=[[*next(iter(asked.values()))[:BLOCK_SIZE], 3]])
            answer = arm.ask("burst", prompts=asked, barrier=True)
            counts.append(answer["counts"])
            tokens.append(answer["tokens"])
    return Result(requests, counts[0], counts[1], tokens[0] == tokens[1])
