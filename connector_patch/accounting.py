"""vLLM's own counts of where a prompt's tokens came from, as far as a connector can correct them.

vLLM takes every token that a connector announces for one that is loaded. `vllm:external_prefix_cache_hits` is
counted by the scheduler itself and stays as it is (docs/design.md, Metrics).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def count_as_local(request: Request, adopted_tokens: int) -> None:
    """Adopted tokens are those of a block that is on the device already; for `vllm:prompt_tokens_by_source`.

    vLLM sets these figures anew each time it admits the request, and counts them with its first token. After
    a preemption it sets them no more.
    """
    stats = request.prefill_stats
    if stats is not None and request.num_preemptions == 0:
        stats.set(
            num_prompt_tokens=stats.num_prompt_tokens,
            num_local_cached_tokens=stats.num_local_cached_tokens + adopted_tokens,
            num_external_cached_tokens=stats.num_external_cached_tokens - adopted_tokens,
        )
