"""A verdict that says yes, for the tests of its file and of the connector that obeys it."""

from __future__ import annotations

from singleflight.gate.verdict import Gain, Prediction, Range, Scope, Trace, Verdict
from singleflight.twin.quantity import Origin, Quantity


def yes(made_at: str = "2026-11-29T21:00:00Z", model: str = "tiny") -> Verdict:
    """For engines of this model with blocks of 32 tokens."""
    return Verdict(
        made_at=made_at,
        enable=True,
        reasons=["It pays."],
        flips=["A faster store."],
        ttft={
            "stock": Prediction(0.8, 2.0, 0.9, 1000, 4000),
            "attach": Prediction(0.4, 1.0, 0.5, 400, 2400),
            "park": Prediction(0.5, 1.1, 0.6, 400, 2400),
        },
        gain=Gain(Range(0.3, 0.44, 0.5), Range(0.2, 0.5, 0.6), 0.05, -0.01),
        redundancy=0.4,
        scope=Scope(
            traces=[Trace("burst", "ab" * 32, 1000, 900, 300.0)],
            steady_requests=900,
            block_size_tokens=32,
            model=model,
            instances=2,
            routing="round_robin",
            capacity_blocks=1000,
            receive_threads=1,
            max_num_seqs=128,
            max_num_batched_tokens=8192,
            store="warm",
            scale=1.0,
            versions={"kv-singleflight": "0.1.0"},
        ),
        figures={
            "load_latency": Quantity(0.005, "s", Origin.MEASURED),
            "kv_bytes_per_token": Quantity(2048, "bytes/token", Origin.GIVEN),
        },
    )
