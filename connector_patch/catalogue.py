"""Every metric of ours: name, kind, labels, what it says. Closed: each series of it is there from the start.

Knows nothing of vLLM, so that tests, the docs' table (`table`) and `make watch` can read it anywhere. A
*figure* is the name by which the scheduler side sends a number (`metrics.py`); it is one series (`prom.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from singleflight.core.choice import Chosen
from singleflight.core.stats import Outcome, Reason

PREFIX: Final = "vllm:singleflight_"
"""vLLM's own, or it would not take our metrics away with its own (`unregister_vllm_metrics`)."""

SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""vLLM's buckets for the time to first token, so that waits can be laid beside it. From a millisecond to past
any deadline: the default one of 64k tokens in blocks of 16 is 215 s."""
WINDOW_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
"""The simulator's windows."""
MEMBERS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Powers of two: half or twice the fan-in is a difference, one more is not."""
BLOCKS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Up to 256k tokens in blocks of 16."""
FAN_IN: Final = {1: "1", 2: "2", 4: "3-4", 8: "5-8", 16: "9-16", 32: "17-32", 64: "33-64"}
"""Largest fan-in of a class -> its label."""
BEYOND: Final = "65+"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with all its series.

    Attributes:
        figures: the figure of each series -> its value of `label`; without a label there is one figure.
        buckets: upper bounds, of a histogram.
    """

    kind: Kind
    short: str
    text: str
    figures: Mapping[str, str]
    label: str | None = None
    buckets: tuple[float, ...] = field(default=())

    @property
    def name(self) -> str:
        """As vLLM registers it; a counter is exposed with `_total` behind it."""
        return PREFIX + self.short


METRICS: Final = (
    Metric(
        Kind.COUNTER,
        "flights",
        "Flights (a leader's load of a run of KV blocks).",
        {
            "flights": "led",
            "landed": "landed",
            "failed": "failed",
            "cut": "cut",
            "orphaned": "orphaned",
            "overdue": "overdue",
            "overtook": "overtook",
            "discarded": "discarded",
            "unregistered": "unregistered",
            "stale_reports": "stale_report",
        },
        "event",
    ),
    Metric(
        Kind.COUNTER,
        "requests",
        "Requests that waited for another's load.",
        {
            "attached": "attached",
            "ready": "ready",
            "cancelled": "cancelled",
            "alone": "alone",
            **{f"fell_back_{reason.value}": f"fell_back_{reason.value}" for reason in Reason},
        },
        "event",
    ),
    Metric(
        Kind.COUNTER,
        "chose",
        "Requests with a prefix in the store, by what they did about it (`load_or_compute`).",
        {f"chose_{what.value}": what.value for what in Chosen},
        "what",
    ),
    Metric(
        Kind.COUNTER,
        "blocks",
        "KV blocks: led (registered by leaders), adopted (by followers when they attached), spared (of"
        " followers that were ready: block loads, and GPU blocks, that nobody needed a second time), lost"
        " (led, but missing in a load that failed in part), broken (found unreadable, where that is known).",
        {
            "blocks_led": "led",
            "blocks_adopted": "adopted",
            "blocks_spared": "spared",
            "blocks_cut": "lost",
            "blocks_broken": "broken",
        },
        "role",
    ),
    Metric(
        Kind.COUNTER,
        "bytes",
        "The same in bytes, all ranks: led, and spared (bytes not loaded).",
        {"bytes_led": "led", "bytes_spared": "spared"},
        "role",
    ),
    Metric(Kind.GAUGE, "pending_blocks", "KV blocks in the air that may be joined.", {"now_pending": ""}),
    Metric(Kind.GAUGE, "flights_in_air", "Flights that have not ended.", {"now_in_air": ""}),
    Metric(Kind.GAUGE, "followers", "Requests that wait for another's load.", {"now_waiting": ""}),
    Metric(
        Kind.GAUGE,
        "breaker_open",
        "1 while nobody waits for others' loads, because loads fail one after the other.",
        {"breaker_open": ""},
    ),
    Metric(
        Kind.HISTOGRAM,
        "follower_wait_seconds",
        "From a follower's attachment to how it left.",
        {f"wait_{outcome.value}": outcome.value for outcome in Outcome},
        "outcome",
        SECONDS,
    ),
    Metric(
        Kind.HISTOGRAM,
        "flight_duration_seconds",
        "From a flight's registration to the report of its end.",
        {"took_landed": "landed", "took_failed": "failed"},
        "outcome",
        SECONDS,
    ),
    Metric(
        Kind.HISTOGRAM,
        "fan_in",
        "Members of a flight that has ended, leader included.",
        {"flight_members": ""},
        buckets=MEMBERS,
    ),
    Metric(
        Kind.HISTOGRAM,
        "flight_blocks",
        "KV blocks of a flight that has ended.",
        {"flight_size": ""},
        buckets=BLOCKS,
    ),
    Metric(
        Kind.COUNTER,
        "shadow_loads",
        "Shadow mode: loads by request.",
        {
            "shadow_loads": "allocated",
            "shadow_failed_loads": "failed",
            "shadow_unregistered_loads": "unregistered",
        },
        "event",
    ),
    Metric(
        Kind.COUNTER,
        "shadow_blocks",
        "Shadow mode: block loads; those in cohorts of two and more; those that could have been spared;"
        " those of cohorts that failed or that a reset ended.",
        {
            "shadow_attempts": "loaded",
            "shadow_dup_attempts": "duplicate",
            "shadow_removable": "removable",
            "shadow_lost": "lost",
        },
        "kind",
    ),
    Metric(
        Kind.COUNTER,
        "shadow_bytes",
        "Shadow mode: the same in bytes, all ranks.",
        {"shadow_attempts_bytes": "loaded", "shadow_removable_bytes": "removable"},
        "kind",
    ),
    Metric(
        Kind.COUNTER,
        "shadow_cohorts",
        "Shadow mode: cohorts (overlapping loads of one block) by how many loads they had.",
        {f"shadow_fan_in_{label}": label for label in (*FAN_IN.values(), BEYOND)},
        "fan_in",
    ),
    Metric(
        Kind.COUNTER,
        "shadow_chose",
        "Shadow mode with `load_or_compute`: requests that loaded, by what they would have done, each for"
        " itself: what the others would have done is not taken into account.",
        {f"shadow_chose_{what.value}": what.value for what in (Chosen.LOAD, Chosen.COMPUTE)},
        "what",
    ),
    Metric(
        Kind.HISTOGRAM,
        "shadow_load_window_seconds",
        "Shadow mode: from a load's scheduling pass to its report.",
        {"shadow_window": ""},
        buckets=WINDOW_SECONDS,
    ),
)
"""Per engine, all of them: labels `model_name` and `engine` come first, as in vLLM's own."""

INFO: Final = PREFIX + "info"
INFO_TEXT: Final = "What the connector came to at start-up; always 1."
INFO_LABELS: Final = ("asked", "mode", "reason", "attach_refused", "verdict", "version", "store")
"""Mode asked for; mode it came to; why another, in words; why a yes of the gate could not be obeyed here,
empty if it could; the verdict's date; our version; whose loads they are (`mooncake`, or what is wrapped).
Only the engine knows them: they are there from its first step on, the prediction if a verdict is named."""
PREDICTED: Final = PREFIX + "predicted_redundancy"
PREDICTED_TEXT: Final = "Share of block loads that the gate's verdict expects to be spared, 0 to 1."


def table() -> str:
    """Every metric as a Markdown table, for the docs."""
    lines = ["| metric | label | says |", "|---|---|---|"]
    for metric in METRICS:
        name = metric.name + ("_total" if metric.kind is Kind.COUNTER else "")
        values = ", ".join(f"`{value}`" for value in metric.figures.values())
        label = f"`{metric.label}`: {values}" if metric.label else ""
        lines.append(f"| `{name}` ({metric.kind.value}) | {label} | {metric.text} |")
    lines.append(f"| `{INFO}` (gauge) | {', '.join(f'`{label}`' for label in INFO_LABELS)} | {INFO_TEXT} |")
    lines.append(f"| `{PREDICTED}` (gauge) | | {PREDICTED_TEXT} |")
    return "\n".join(lines)
