"""The probe opens the suite: the duplicated work of stock, and that ours has none, on the real path.

vllm#50433: eight requests that share a cold block did eight lookups, load specs, queue entries and Gets
into eight addresses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from singleflight.stack import probe

ONE = dict.fromkeys(probe.COUNTED, 1)
STOCK = {**dict.fromkeys(probe.COUNTED, 8), "bytes": 8 * 64}


@pytest.mark.engine
def test_eight_requests_for_one_cold_block_cost_stock_eight_of_everything_and_us_one() -> None:
    run = subprocess.run(
        [Path(sys.executable).parent / "singleflight", "probe", "--requests", "8", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "random"},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    shown = json.loads(run.stdout)
    block_bytes = shown["singleflight"]["bytes"]
    assert shown == {
        "requests": 8,
        "stock": {**dict.fromkeys(probe.COUNTED, 8), "bytes": 8 * block_bytes},
        "singleflight": {**ONE, "bytes": block_bytes},
        "tokens_equal": True,
    }
    # float32: 32 tokens x 4 layers x keys and values x 1 head x 64 wide.
    assert block_bytes == 32 * 4 * 2 * 64 * 4


@pytest.mark.parametrize("name", probe.COUNTED)
@pytest.mark.parametrize("arm", ["stock", "singleflight"])
def test_the_probe_fails_if_any_count_is_off_by_one(arm: str, name: str) -> None:
    counts = {"stock": dict(STOCK), "singleflight": {**ONE, "bytes": 64}}
    assert probe.Result(8, **counts, tokens_equal=True).problems() == []
    counts[arm] = {**counts[arm], name: counts[arm][name] + 1}
    assert probe.Result(8, **counts, tokens_equal=True).problems()


def test_the_probe_fails_if_both_arms_are_stock() -> None:
    assert probe.Result(8, STOCK, STOCK, tokens_equal=True).problems()


def test_the_probe_fails_if_nothing_was_transferred() -> None:
    nothing = dict.fromkeys(probe.COUNTED, 0)
    assert probe.Result(8, nothing, nothing, tokens_equal=True).problems()


def test_the_probe_fails_if_tokens_differ() -> None:
    result = probe.Result(8, STOCK, {**ONE, "bytes": 64}, tokens_equal=False)
    assert result.problems() == ["the two connectors did not generate the same tokens"]
