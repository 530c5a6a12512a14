"""What an engine computes: tokens by request, and the hashes of a prompt's blocks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine


@contextlib.contextmanager
def computed(engine: Engine) -> Iterator[Counter[str]]:
    """Tokens that each request has been scheduled to compute in the block, by the name the test gave it."""
    counts: Counter[str] = Counter()
    stock = engine.scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        for request_id, tokens in output.num_scheduled_tokens.items():
            counts[request_id.rpartition("-")[0]] += tokens
        return output

    engine.scheduler.schedule = schedule
    try:
        yield counts
    finally:
        del engine.scheduler.schedule


def hashes(engine: Engine, prompt: Sequence[int]) -> list[bytes]:
    """Of each whole block."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    hasher = engine.core.request_block_hasher
    request = Request("hashes", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return list(request.block_hashes)
