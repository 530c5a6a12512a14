"""What a recording of ours says about its deployment: figures of the twin, and what the store holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from singleflight.gate.fit import line
from singleflight.traces.recording import Header
from singleflight.traces.request import Observed, Request
from singleflight.twin.instance import Stored

FEWEST = 20
"""Observations below which a line through them says nothing."""
WIDE = 2.0
"""And how many times the smallest the largest must be."""
STOCK = ("off", "shadow")
"""Modes in which every request loads for itself, so that what it waited for is its own load."""


def figures(rows: Sequence[Request], header: Header) -> dict[str, float]:
    """Figures of the twin, by name, as far as the recording shows them.

    - ``load_latency``, ``load_bandwidth``: of loads while no other was on its way, from the step that hands
      it over to the one that hears of its end; the line through seconds over bytes. Only where loads were
      each request's own (`STOCK`).
    - ``step_overhead``, ``prefill_rate``, ``attention``: of prefills in one step while no other request
      prefilled; the plane through seconds over tokens and pairs of tokens.

    Args:
        rows: in order of arrival, as the reader gives them.
    """
    found: dict[str, float] = {}
    seen = [(row, row.observed) for row in rows if row.observed is not None]
    if (size := header.kv_bytes_per_token) is not None:
        found["kv_bytes_per_token"] = size
    if size is not None and header.mode in STOCK:
        found |= _loads(seen, size * header.block_size_tokens)
    if (most := header.max_num_batched_tokens) is not None:
        found |= _prefills(seen, most)
    return found


def _loads(seen: Sequence[tuple[Request, Observed]], block_bytes: float) -> dict[str, float]:
    spans = [
        (row.timestamp_ms + of.admitted_ms, row.timestamp_ms + of.landed_ms, of.loaded_blocks)
        for row, of in seen
        if of.admitted_ms is not None and of.landed_ms is not None and of.loaded_blocks
    ]
    start, end, blocks = _alone(spans)
    if len(start) < FEWEST:
        return {}
    size = blocks * block_bytes
    if size.max() < WIDE * size.min():  # of one size: what is latency and what bandwidth cannot be told
        return {"load_latency": 0.0, "load_bandwidth": float(np.median(size / (end - start)))}
    latency, per_byte = line(end - start, size)
    return {"load_latency": latency, "load_bandwidth": 1 / per_byte} if per_byte > 0 else {}


def _prefills(seen: Sequence[tuple[Request, Observed]], most_tokens: int) -> dict[str, float]:
    spans: list[tuple[float, float, int]] = []
    tokens: list[int] = []
    pairs: list[float] = []
    for row, of in seen:
        if of.prefill_ms is None or of.first_token_ms is None or not of.prefill_tokens:
            continue
        spans.append((row.timestamp_ms + of.prefill_ms, row.timestamp_ms + of.first_token_ms, len(tokens)))
        tokens.append(of.prefill_tokens)
        pairs.append(of.prefill_tokens * (row.lengths.input - of.prefill_tokens / 2))
    start, end, which = _alone(spans)
    computed, attended = np.array(tokens, np.float64)[which], np.array(pairs, np.float64)[which]
    whole = computed <= most_tokens
    took, computed, attended = (end - start)[whole], computed[whole], attended[whole]
    if len(took) < FEWEST or computed.max() < WIDE * computed.min():
        return {}
    overhead, per_token, per_pair = line(took, computed, attended)
    if overhead <= 0 or per_token <= 0:
        return {}
    return {"step_overhead": overhead, "prefill_rate": 1 / per_token, "attention": per_pair}


def _alone(
    spans: Sequence[tuple[float, float, int]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """(start s, end s, third) of the spans of time, given in ms, that overlap no other."""
    if not spans:
        return np.zeros(0), np.zeros(0), np.zeros(0, np.int64)
    start, end, third = (np.array(each, np.float64) for each in zip(*sorted(spans), strict=True))
    before = np.maximum.accumulate(end)
    alone = (np.append(-np.inf, before[:-1]) <= start) & (np.append(start[1:], np.inf) >= end) & (end > start)
    return start[alone] / 1000, end[alone] / 1000, third[alone].astype(np.int64)


def store(rows: Sequence[Request], block_tokens: int) -> Stored | None:
    """What the store held when the recording began: ``warm`` if most blocks that came for the first time were
    loaded, else ``computed``. None if the rows do not say."""
    known: set[int] = set()
    new = loaded = 0
    for row in rows:
        full = row.hashes[: row.lengths.input // block_tokens]
        of = row.observed
        if of is not None and of.prefill_tokens is not None:
            there = (row.lengths.input - of.prefill_tokens) // block_tokens
            for i, block in enumerate(full):
                if block not in known:
                    new += 1
                    loaded += there - of.loaded_blocks <= i < there
        known.update(full)
    if not new:
        return None
    return "warm" if 2 * loaded >= new else "computed"
