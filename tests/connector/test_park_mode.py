"""`mode: park` from the configuration to the tokens; its faults are in tests/faults/test_park.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from singleflight.stack.arms import OURS, arm
from tests.support import blocks, expect_equal, salts

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm
    from singleflight.stack.embedded import Stack

pytestmark = pytest.mark.engine


def test_eight_requests_for_one_cold_prefix_load_it_once(stack: Stack, reference: Arm) -> None:
    """In a process of its own, with the one receive thread that is vLLM's default. The link is so slow that
    all have been through the scheduler before the first Get ends."""
    trunk = blocks(1, 2, 3, 4, salt=next(salts))
    prompts = {f"parked-{i}": [*trunk, *[7 + i] * 4] for i in range(8)}
    with arm(stack, OURS, {"singleflight": {"mode": "park"}}) as park:
        park.answer()
        park.ask("fill", prompts=[[*trunk, 3]])
        answer = park.ask("burst", prompts=prompts, bytes_per_s=5e5)
        park.ask("cold")  # raises where a request is stuck or a block is lost
    counts = answer["counts"]
    assert counts["lookups"] == counts["queue_entries"] == counts["gets"] == 1
    assert counts["keys"] == counts["gpu_blocks"] == 4
    expect_equal(reference, prompts, answer["tokens"])


def test_beside_another_connector(stack: Stack, reference: Arm, tmp_path: Path) -> None:
    """Hazard K1, and vllm-facts: "MultiConnector [Mooncake, Example]: 8 Gets, 1 (park)". Attach passes
    through there."""
    parking = {"singleflight": {"mode": "park"}}
    children = [
        {"kv_connector": OURS, "kv_role": "kv_both", "kv_connector_extra_config": parking},
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    ]
    trunk = blocks(1, 2, 3, 4, salt=next(salts))
    prompts = {f"multi-{i}": [*trunk, *[7 + i] * 4] for i in range(8)}
    with arm(stack, "MultiConnector", {"connectors": children}) as multi:
        multi.answer()
        multi.ask("fill", prompts=[[*trunk, 3]])
        answer = multi.ask("burst", prompts=prompts, bytes_per_s=5e5)
        multi.ask("cold")
    counts = answer["counts"]
    assert (counts["gets"], counts["keys"], counts["gpu_blocks"]) == (1, 4, 4)
    expect_equal(reference, prompts, answer["tokens"])
