"""Our counters, through vLLM's own statistics: its log line and its Prometheus endpoint.

The scheduler side hands vLLM what has changed since the last step, as one more "operation" beside the
stock connector's, so that vLLM's way of merging statistics needs no change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
    MooncakeStorePromMetrics,
)

from singleflight.stats import Reason, Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

KEY: Final = "singleflight"

FLIGHTS: Final = {
    "flights": "led",
    "landed": "landed",
    "failed": "failed",
    "orphaned": "orphaned",
    "overdue": "overdue",
    "overtook": "overtook",
    "discarded": "discarded",
    "unregistered": "unregistered",
    "stale_reports": "stale_report",
}
REQUESTS: Final = {
    "attached": "attached",
    "ready": "ready",
    "cancelled": "cancelled",
    "alone": "alone",
    **{f"fell_back_{reason.value}": f"fell_back_{reason.value}" for reason in Reason},
}
BLOCKS: Final = {"blocks_led": "led", "blocks_adopted": "adopted"}
COUNTERS: Final = (
    ("vllm:singleflight_flights", "event", "Flights (a leader's load of a run of KV blocks).", FLIGHTS),
    ("vllm:singleflight_requests", "event", "Requests that waited for another's load.", REQUESTS),
    (
        "vllm:singleflight_blocks",
        "role",
        "KV blocks registered by leaders, and block loads that followers were spared.",
        BLOCKS,
    ),
)


def flat(stats: Stats) -> dict[str, int]:
    """Every counter by one name."""
    counts = stats.snapshot()
    del counts["fan_in"]
    fell_back: Mapping[str, int] = counts.pop("fell_back")
    return {**counts, **{f"fell_back_{reason}": n for reason, n in fell_back.items()}}


class Deltas:
    """What has changed since the last question."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._told = flat(stats)

    def take(self) -> MooncakeStoreConnectorStats | None:
        now = flat(self._stats)
        if now == self._told:
            return None
        changed = {name: n - self._told[name] for name, n in now.items() if n != self._told[name]}
        self._told = now
        return MooncakeStoreConnectorStats(data={KEY: [changed]})


def total(records: list[dict[str, Any]]) -> dict[str, int]:
    """The sum of several steps' changes."""
    sums: dict[str, int] = {}
    for record in records:
        for name, n in record.items():
            sums[name] = sums.get(name, 0) + n
    return sums


class SingleFlightStats(MooncakeStoreConnectorStats):
    """The stock statistics and ours, for vLLM's log line."""

    def reduce(self) -> dict[str, int | float]:
        ours = total(self.data.get(KEY, []))
        stock = MooncakeStoreConnectorStats(data={k: v for k, v in self.data.items() if k != KEY})
        return {**stock.reduce(), **{f"{KEY}_{name}": n for name, n in ours.items()}}


class SingleFlightPromMetrics(MooncakeStorePromMetrics):
    """The stock metrics and ours, for vLLM's Prometheus endpoint."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._ours: list[tuple[Any, dict[str, str]]] = [
            (self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, label]), values)
            for name, label, text, values in COUNTERS
        ]

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        data = dict(transfer_stats_data or {})
        ours = total(data.pop(KEY, []))
        super().observe(data, engine_idx)
        for counter, values in self._ours:
            for name, value in values.items():
                if n := ours.get(name):
                    counter.labels(*self.per_engine_labelvalues[engine_idx], value).inc(n)
