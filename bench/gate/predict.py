"""What the twin says of a workload, with figures from lone prompts and loads."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from bench.gate.lone import LOADS
from bench.gate.workloads import BLOCK_TOKENS, Arrival, Setup, Workload
from singleflight.twin.arrivals import Arrivals
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance, Mode
from singleflight.twin.model import simulate
from singleflight.twin.outcome import Outcome

KV_BYTES_PER_TOKEN = 2048
"""Of the tiny model."""
BLOCK_BYTES = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
STEP_TOKENS = 8192
"""max_num_batched_tokens of the lab's engine."""


def figures(lone: Sequence[dict[str, Any]], gbit_s: float | None, latency_s: float, threads: int) -> Figures:
    """The twin's, measured: over one link, with so many receive threads (`bench.gate.lone`).

    A step is taken for overhead + tokens / rate + pairs x attention + context before prompts + what decodes,
    least squares of relative errors with no figure below 0. A Get, a lookup and what adding a request takes:
    a line each, through the medians of their sizes.
    """
    steps = np.array([step for each in lone for step in each["steps"]], float)
    tokens, pairs, prompts, decoding, contexts, seconds = steps.T
    before = _before(tokens, pairs, prompts)
    terms = np.column_stack([np.ones(len(steps)), tokens, pairs, before, decoding, contexts])
    overhead, per_token, per_pair, per_before, per_decoding, per_context = _least(terms, seconds, 1.0)
    links = [
        link
        for each in lone
        for link in each["links"]
        if (link["gbit_s"], link["latency_s"]) == (gbit_s, latency_s)
    ]
    load_latency, per_block = _line(_medians(link["alone"] for link in links))
    lookup_s, lookup_per_block = _line(_medians(each["lookups"] for each in lone))
    frontend_s, frontend_per_token = _line(_medians(each["added"] for each in lone))
    measured = Figures().measured(
        load_latency=load_latency,
        load_bandwidth=BLOCK_BYTES / per_block,
        parallel_loads=_parallel(links, threads, load_latency, per_block),
        kv_bytes_per_token=float(KV_BYTES_PER_TOKEN),
        lookup_latency=lookup_s,
        lookup_per_block=lookup_per_block,
        prefill_rate=1 / max(per_token, 1e-9),
        attention=per_pair,
        prefill_context=per_before,
        step_overhead=overhead,
        decode_per_request=per_decoding,
        decode_context=per_context,
        idle_step=statistics.fmean(took for each in lone for took in each["idle_s"]),
        frontend_per_request=frontend_s,
        frontend_per_token=frontend_per_token,
    )
    return measured.measured(
        **_lookup_again(lone, lookup_s, lookup_per_block),
        **_slowdowns(links, load_latency + max(LOADS) * per_block),
    )


def _least(terms: Any, seconds: Any, power: float) -> list[float]:
    """The cost of each term, none below 0; errors are taken to grow with seconds to that power."""
    # Scaled, or the largest column rules how well the smallest is solved for.
    scale, weight = terms.max(axis=0), seconds**-power
    costs = nnls(terms / scale * weight[:, None], seconds * weight)[0] / scale
    return [float(cost) for cost in costs]


def _before(tokens: Any, pairs: Any, prompts: Any) -> Any:
    """Tokens of context before the chunks of prompts that each step computed; all chunks of a step are of one
    length here, so its pairs say it."""
    chunk = tokens / np.maximum(prompts, 1)
    return np.where(prompts > 0, pairs / np.maximum(chunk, 1) - (chunk - 1) / 2 * prompts, 0.0)


def _medians(samples: Any) -> dict[int, float]:
    """size -> median seconds, of several lists of (size, seconds)."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for each in samples:
        for size, seconds in each:
            by_size[size].append(seconds)
    return {size: statistics.median(all_of) for size, all_of in sorted(by_size.items())}


def _line(medians: dict[int, float]) -> list[float]:
    """Seconds at size 0, and for each unit of size; neither below 0.

    Between relative and absolute errors: a block alone goes through the shaper's bucket at full speed, and
    says little of a load of a hundred.
    """
    size, took = np.array(list(medians), float), np.array(list(medians.values()))
    return _least(np.column_stack([np.ones(len(size)), size]), took, 0.5)


def _parallel(links: Sequence[dict[str, Any]], threads: int, latency_s: float, per_block_s: float) -> float:
    """How many times more bytes a second all receive threads bring than one; below 1 where they are in each
    other's way."""
    together = [each for link in links if link["threads"] == threads for each in link["together"]]
    if not together:
        return 1.0
    blocks = together[0][0]
    transfer_s = statistics.median(seconds for _, seconds in together) - latency_s
    return min(max(blocks * per_block_s / max(transfer_s, 1e-9), 0.05), float(threads))


def _lookup_again(lone: Sequence[dict[str, Any]], latency_s: float, per_block_s: float) -> dict[str, float]:
    """What share of a lone lookup's latency one takes that follows another; nothing if not measured."""
    took = [
        seconds - blocks * per_block_s for each in lone for blocks, seconds in each.get("again", ()) if blocks
    ]
    return {"lookup_again": min(max(statistics.median(took) / latency_s, 0.0), 1.0)} if took else {}


def _slowdowns(links: Sequence[dict[str, Any]], load_s: float) -> dict[str, float]:
    """How many times longer a step is in which one request decodes while a load of LOADS' largest comes in,
    and that load, which alone takes `load_s`; nothing if it was not measured."""
    beside, apart, loads = (
        [seconds for link in links for each in link.get("decoding", ()) for seconds in each.get(kind, ())]
        for kind in ("beside", "apart", "load")
    )
    found = {}
    if beside:
        found["loading_slowdown"] = max(statistics.median(beside) / statistics.median(apart), 1.0)
    if loads:
        found["computing_slowdown"] = max(statistics.median(loads) / load_s, 1.0)
    return found


def arrivals_of(arrivals: Sequence[Arrival]) -> Arrivals:
    """As the twin takes them; what is computed is in no block that has a name."""
    sizes = [len(each.blocks) for each in arrivals]
    names, blocks = np.unique([name for each in arrivals for name in each.blocks], return_inverse=True)
    return Arrivals(
        times=np.array([each.at_s for each in arrivals]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        blocks=blocks.astype(np.int32),
        prompts=np.array([len(each.blocks) * BLOCK_TOKENS + each.computed for each in arrivals], np.int64),
        outputs=np.array([each.output for each in arrivals], np.int64),
        stored_from=np.full(len(names), np.inf),
        source=np.arange(len(arrivals)),
    )


def instance_of(setup: Setup) -> Instance:
    return Instance(
        block_tokens=BLOCK_TOKENS,
        gpu_blocks=setup.kv_blocks - 1,  # vLLM's null block
        receive_threads=setup.threads,
        max_num_seqs=setup.seats,
        max_num_batched_tokens=STEP_TOKENS,
        store="warm",
        synchronous_launch=True,
        in_process=True,
    )


def predicted(workload: Workload, arrivals: Sequence[Arrival], costs: Figures, mode: Mode) -> Outcome:
    return simulate(arrivals_of(arrivals), costs, instance_of(workload.setup), mode)
