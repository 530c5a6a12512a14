"""What the gate makes of a recording's rows, and of times that were measured."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from singleflight.gate import recorded
from singleflight.gate.fit import line
from singleflight.traces.recording import Header
from singleflight.traces.request import Lengths, Observed, Request

BLOCK = 32
BYTES = 2048.0
"""Of KV a token."""


def header(mode: str = "shadow") -> Header:
    return Header(BLOCK, "tiny", None, mode=mode, max_num_batched_tokens=512, kv_bytes_per_token=BYTES)


def row(at_ms: int, blocks: int, loaded: int, load_ms: float, prefill_ms: float, computed: int) -> Request:
    """A request that is admitted after 1 ms, loads, and prefills."""
    landed = 1 + load_ms
    seen = Observed(0.5, 1, loaded, landed if loaded else None, landed, computed, landed + prefill_ms)
    return Request(at_ms, range(at_ms, at_ms + blocks), Lengths(BLOCK * blocks + 1, 1), seen)


def measured(rows: Iterable[Request], mode: str = "shadow") -> dict[str, float]:
    return recorded.figures(list(rows), header(mode))


def lone(count: int = 40) -> list[Request]:
    """One a second: 5 ms and 50 MB/s, a step of 10 ms and 2,000 tokens/s."""
    rows = []
    for i in range(count):
        loaded = 4 + i % 8
        computed = 16 + 40 * (i % 5)
        load_ms = 5 + loaded * BLOCK * BYTES / 50e6 * 1000
        rows.append(row(1000 * i, loaded + 8, loaded, load_ms, 10 + computed / 2, computed))
    return rows


def test_loads_and_prefills_that_were_alone_give_the_figures() -> None:
    found = measured(lone())
    assert found["load_latency"] == pytest.approx(0.005, rel=0.01)
    assert found["load_bandwidth"] == pytest.approx(50e6, rel=0.01)
    assert found["step_overhead"] == pytest.approx(0.01, rel=0.05)
    assert found["prefill_rate"] == pytest.approx(2000, rel=0.05)
    assert found["kv_bytes_per_token"] == BYTES


def test_those_that_were_not_alone_do_not_count() -> None:
    """A burst shares the link and waits in the queue, which is no property of a load."""
    crowd = [row(1000 * i + 1, 12, 8, 900, 90, 16) for i in range(40)]
    both = sorted([*lone(), *crowd], key=lambda each: each.timestamp_ms)
    assert "load_latency" not in measured(both)


def test_few_say_nothing() -> None:
    assert measured(lone(19)).keys() == {"kv_bytes_per_token"}


def test_where_requests_wait_for_others_a_wait_is_no_load() -> None:
    found = measured(lone(), mode="attach")
    assert "load_latency" not in found
    assert "prefill_rate" in found


def test_loads_of_one_size_have_a_time_and_no_latency_of_their_own() -> None:
    found = measured(row(1000 * i, 12, 8, 20, 10, 16) for i in range(30))
    assert found["load_latency"] == 0
    assert 8 * BLOCK * BYTES / found["load_bandwidth"] == pytest.approx(0.02)


def test_rows_of_an_earlier_version_say_nothing() -> None:
    rows = [each._replace(observed=None) for each in lone()]
    assert recorded.figures(rows, Header(BLOCK, "tiny", None)) == {}
    assert recorded.store(rows, BLOCK) is None


@pytest.mark.parametrize(("loaded", "store"), [(8, "warm"), (2, "computed")])
def test_what_is_loaded_when_it_first_comes_was_there_before(loaded: int, store: str) -> None:
    rows = [row(1000 * i, 8, loaded, 20, 10, BLOCK * (8 - loaded) + 1) for i in range(30)]
    assert recorded.store(rows, BLOCK) == store


class TestLine:
    def test_a_plane_is_found_however_different_the_sizes(self) -> None:
        rng = np.random.default_rng(0)
        tokens, pairs = rng.uniform(10, 4000, 50), rng.uniform(1e3, 1e7, 50)
        took = 0.01 + 1e-4 * tokens + 3e-9 * pairs
        assert line(took, tokens, pairs) == pytest.approx((0.01, 1e-4, 3e-9))

    def test_what_would_be_negative_is_nothing(self) -> None:
        sizes = np.array([1.0, 2.0, 3.0, 4.0])
        constant, slope = line(2 * sizes - 0.5, sizes)
        assert constant == 0
        assert slope == pytest.approx(1.8, abs=0.1)
