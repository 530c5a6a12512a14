"""What the twin says beside what `bench/ab` has measured on a real engine behind a real shaped link.

No figure is fitted to these times. The link's rate is what the kernel was told. Step, lookup, attention and
front end are from two cells that are not here: the one without any load (20 ms in all), and the burst of 32
over an unshaped link in attach mode (8 ms for each request more).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.ab import workloads
from bench.ab.workloads import CHUNK, Load
from singleflight.traces.request import Lengths, Request
from singleflight.twin import kernel
from singleflight.twin.arrivals import Arrivals
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance, Mode

RESULTS = Path(__file__).parents[2] / "bench/results/2026-11-30-amd-epyc-2-cores/results.json"
BLOCK = 32
OWN = 10**12
"""Names of blocks from here on are of one request alone, and not stored."""
HOST = Figures().given(
    load_latency=0.005,
    load_bandwidth=workloads.SLOW * 1e9 / 8,
    kv_bytes_per_token=2048,
    lookup_latency=1e-3,
    lookup_per_block=1e-5,
    prefill_rate=20_000,
    attention=1.2e-7,
    step_overhead=0.012,
    decode_per_request=1e-3,
    decode_context=5e-7,
    frontend_per_request=1e-3,
    frontend_per_token=1e-6,
)
SERVER = Instance(BLOCK, 64 * (4096 // BLOCK + 2), max_num_seqs=128, max_num_batched_tokens=8192)
"""As `bench/ab/servers.py` starts it."""

CELLS: dict[str, Load] = {
    "burst of 2": workloads.burst(2),
    "burst of 4": workloads.burst(4),
    "burst of 8": workloads.burst(8),
    "burst of 16": workloads.burst(16),
    "burst of 32": workloads.burst(32),
    "partial overlap": workloads.partial(),
    "agent fan-out": workloads.agents(),
    "no sharing": workloads.distinct(),
}


def arrivals(load: Load) -> Arrivals:
    """A chunk is two blocks. The last is each request's own, and all others are stored before."""
    requests = []
    for row in load.rows:
        *chunks, own = row["hash_ids"]
        names = [2 * chunk + half for chunk in chunks for half in range(CHUNK // BLOCK)]
        requests.append(
            Request(
                round(1000 * row["timestamp"]),
                [*names, OWN + own],
                Lengths(row["input_length"], row["output_length"]),
            )
        )
    made = Arrivals.of(requests)
    named = np.concatenate([request.hashes for request in requests])
    stored_from = np.empty(len(made.stored_from))
    stored_from[made.blocks] = np.where(named < OWN, 0.0, np.inf)
    return replace(made, stored_from=stored_from)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    cells = json.loads(RESULTS.read_text())["cells"]
    return {cell["name"]: cell["arms"] for cell in cells}


@pytest.mark.parametrize("mode", ["stock", "attach", "park"])
@pytest.mark.parametrize("name", CELLS)
def test_on_a_narrow_link_the_median_is_within_15_percent_of_what_was_measured(
    measured: dict[str, Any], name: str, mode: Mode
) -> None:
    """What issue 16 asks of the mean."""
    outcome = kernel.simulate(arrivals(CELLS[name]), HOST, SERVER, mode)
    arm = measured[name][mode]
    assert np.median(outcome.ttft_s) == pytest.approx(arm["median_s"], rel=0.15)
    assert outcome.n_gets == arm["counts"]["gets"]
