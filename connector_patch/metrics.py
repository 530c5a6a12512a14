"""Our counters, through vLLM's own statistics: its log line and its Prometheus endpoint.

The scheduler side hands vLLM what has changed since the last step, as one more "operation" beside the
stock connector's, so that vLLM's way of merging statistics needs no change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
    MooncakeStorePromMetrics,
)

from singleflight.stats import Reason, Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

    from .shadow import Shadow

KEY: Final = "singleflight"
WINDOWS: Final = "singleflight_windows"
"""Seconds; one record a load, for a histogram."""

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
FAN_IN: Final = {1: "1", 2: "2", 4: "3-4", 8: "5-8", 16: "9-16", 32: "17-32", 64: "33-64"}
"""Largest fan-in of a class -> its label."""
BEYOND: Final = "65+"
SHADOW_LOADS: Final = {
    "shadow_loads": "allocated",
    "shadow_failed_loads": "failed",
    "shadow_unregistered_loads": "unregistered",
}
SHADOW_BLOCKS: Final = {
    "shadow_attempts": "loaded",
    "shadow_dup_attempts": "duplicate",
    "shadow_removable": "removable",
    "shadow_lost": "lost",
}
SHADOW_BYTES: Final = {"shadow_attempts_bytes": "loaded", "shadow_removable_bytes": "removable"}
SHADOW_COHORTS: Final = {f"shadow_fan_in_{label}": label for label in (*FAN_IN.values(), BEYOND)}
COUNTERS: Final = (
    ("vllm:singleflight_flights", "event", "Flights (a leader's load of a run of KV blocks).", FLIGHTS),
    ("vllm:singleflight_requests", "event", "Requests that waited for another's load.", REQUESTS),
    (
        "vllm:singleflight_blocks",
        "role",
        "KV blocks registered by leaders, and block loads that followers were spared.",
        BLOCKS,
    ),
    ("vllm:singleflight_shadow_loads", "event", "Shadow mode: loads by request.", SHADOW_LOADS),
    (
        "vllm:singleflight_shadow_blocks",
        "kind",
        "Shadow mode: block loads; those in cohorts of two and more; those that could have been spared.",
        SHADOW_BLOCKS,
    ),
    ("vllm:singleflight_shadow_bytes", "kind", "Shadow mode: the same in bytes, all ranks.", SHADOW_BYTES),
    (
        "vllm:singleflight_shadow_cohorts",
        "fan_in",
        "Shadow mode: cohorts (overlapping loads of one block) by how many loads they had.",
        SHADOW_COHORTS,
    ),
)
WINDOW_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
"""The simulator's windows."""


def flat(stats: Stats) -> dict[str, int]:
    """Every counter by one name."""
    counts = stats.snapshot()
    del counts["fan_in"]
    fell_back: Mapping[str, int] = counts.pop("fell_back")
    return {**counts, **{f"fell_back_{reason}": n for reason, n in fell_back.items()}}


def flat_shadow(shadow: Shadow, bytes_per_block: int) -> dict[str, int]:
    """The same for shadow mode."""
    stats = shadow.stats
    classes: Counter[str] = Counter()
    for members, cohorts in stats.fan_in.items():
        classes[next((label for most, label in FAN_IN.items() if members <= most), BEYOND)] += cohorts
    counts = {name: getattr(stats, name.removeprefix("shadow_")) for name in (*SHADOW_LOADS, *SHADOW_BLOCKS)}
    for name in SHADOW_BYTES:
        counts[name] = counts[name.removesuffix("_bytes")] * bytes_per_block
    return {**counts, **{name: classes[label] for name, label in SHADOW_COHORTS.items()}}


class Deltas:
    """What has changed since the last question.

    Args:
        counts: gives every counter by its name in `COUNTERS`.
    """

    def __init__(self, counts: Callable[[], dict[str, int]]) -> None:
        self._counts = counts
        self._told = counts()

    def take(self, windows_s: list[float] | None = None) -> MooncakeStoreConnectorStats | None:
        """As vLLM takes it; None if nothing has changed. `windows_s`: load windows seen since, if counted."""
        now = self._counts()
        if now == self._told:
            return None
        changed = {name: n - self._told[name] for name, n in now.items() if n != self._told[name]}
        self._told = now
        return MooncakeStoreConnectorStats(
            data={KEY: [changed], **({WINDOWS: windows_s} if windows_s else {})}
        )


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
        stock = MooncakeStoreConnectorStats(
            data={k: v for k, v in self.data.items() if k not in (KEY, WINDOWS)}
        )
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
        histogram: Any = self._histogram_cls  # declared as any of three kinds
        self._windows = histogram(
            name="vllm:singleflight_shadow_load_window_seconds",
            documentation="Shadow mode: from a load's scheduling pass to its report.",
            buckets=WINDOW_BUCKETS_S,
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        data = dict(transfer_stats_data or {})
        ours = total(data.pop(KEY, []))
        windows_s = data.pop(WINDOWS, [])
        super().observe(data, engine_idx)
        for counter, values in self._ours:
            for name, value in values.items():
                if n := ours.get(name):
                    counter.labels(*self.per_engine_labelvalues[engine_idx], value).inc(n)
        for seconds in windows_s:
            self._windows.labels(*self.per_engine_labelvalues[engine_idx]).observe(seconds)
