"""What the scheduler side hands to vLLM's statistics: counts, gauges and observations since the last step.

It travels as one more "operation" beside the stock connector's, so that vLLM's way of merging statistics
needs no change: `{KEY: [record, ...]}`, a list that grows where steps are merged. A record has up to four
parts, each there only if there is something in it; `catalogue.py` lists the figures:

    {"add": {figure: n}, "set": {figure: now}, "saw": {figure: [values]}, "info": {label: text}}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import MooncakeStoreConnectorStats

from singleflight.core.stats import Observed, Stats, Wait

from .catalogue import BEYOND, FAN_IN, METRICS, Kind
from .wrapped import WrappedStats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

    from singleflight.core.table import PendingBlockTable

    from .shadow import Shadow

KEY: Final = "singleflight"
Record = dict[str, Any]

_INTEGERS: Final = tuple(field.name for field in fields(Stats) if field.type in (int, "int"))
_integers: Final = attrgetter(*_INTEGERS)
_GAUGES: Final = {figure for metric in METRICS if metric.kind is Kind.GAUGE for figure in metric.figures}
_NOW: Final = [name for name in _INTEGERS if name in _GAUGES]
"""Those of the table's statistics that are not counts, but how things stand."""


def flat(stats: Stats, bytes_per_block: int) -> dict[str, int]:
    """The table's counters by figure."""
    counts = {name: getattr(stats, name) for name in _INTEGERS if name not in _GAUGES}
    counts.update((f"fell_back_{reason.value}", n) for reason, n in stats.fell_back.items())
    for role in ("led", "spared"):
        counts[f"bytes_{role}"] = counts[f"blocks_{role}"] * bytes_per_block
    return counts


def flat_shadow(shadow: Shadow, bytes_per_block: int) -> dict[str, int]:
    """Shadow mode's counters by figure."""
    stats = shadow.stats
    classes: Counter[str] = Counter()
    for members, cohorts in stats.fan_in.items():
        classes[next((label for most, label in FAN_IN.items() if members <= most), BEYOND)] += cohorts
    return {
        "shadow_loads": stats.loads,
        "shadow_failed_loads": stats.failed_loads,
        "shadow_unregistered_loads": stats.unregistered_loads,
        "shadow_attempts": stats.attempts,
        "shadow_dup_attempts": stats.dup_attempts,
        "shadow_removable": stats.removable,
        "shadow_lost": stats.lost,
        "shadow_attempts_bytes": stats.attempts * bytes_per_block,
        "shadow_removable_bytes": stats.removable * bytes_per_block,
        "shadow_chose_load": stats.chose_load,
        "shadow_chose_compute": stats.chose_compute,
        **{f"shadow_fan_in_{label}": classes[label] for label in (*FAN_IN.values(), BEYOND)},
    }


class Source(Protocol):
    """Where the numbers are."""

    def changed(self) -> bool:
        """Whether there can be anything new; asked in every step, so cheap."""

    def counts(self) -> dict[str, int]: ...

    def gauges(self) -> dict[str, int]: ...

    def observed(self) -> dict[str, list[float]]:
        """What has been seen since the last call."""


class OfTheTable:
    """Attach and park mode.

    Args:
        ended: told of each wait that has ended, once (`tracing.py`).
    """

    def __init__(
        self,
        table: PendingBlockTable,
        bytes_per_block: int,
        ended: Callable[[Iterable[Wait]], None] = lambda waits: None,
    ) -> None:
        self._table = table
        self._bytes_per_block = bytes_per_block
        self._ended = ended
        self._seen: tuple[object, ...] = ()

    def changed(self) -> bool:
        stats = self._table.stats
        now = (*_integers(stats), sum(stats.fell_back.values()))
        before, self._seen = self._seen, now
        return now != before

    def counts(self) -> dict[str, int]:
        return flat(self._table.stats, self._bytes_per_block)

    def gauges(self) -> dict[str, int]:
        table = self._table
        return {
            "now_pending": len(table),
            "now_in_air": table.in_air,
            "now_waiting": table.stats.waiting,
            **{name: getattr(table.stats, name) for name in _NOW},
        }

    def observed(self) -> dict[str, list[float]]:
        waits, flights = self._table.observed.waits, self._table.observed.flights
        self._table.observed = Observed()
        self._ended(waits)
        saw: dict[str, list[float]] = {}
        for wait in waits:
            saw.setdefault(f"wait_{wait.outcome.value}", []).append(wait.seconds)
        for flown in flights:
            saw.setdefault("took_landed" if flown.landed else "took_failed", []).append(flown.seconds)
        if flights:
            saw["flight_members"] = [flown.fan_in for flown in flights]
            saw["flight_size"] = [flown.blocks for flown in flights]
        return saw


class OfTheShadow:
    """Shadow mode."""

    def __init__(self, shadow: Shadow, bytes_per_block: int) -> None:
        self._shadow = shadow
        self._bytes_per_block = bytes_per_block

    def changed(self) -> bool:
        return self._shadow.changed

    def counts(self) -> dict[str, int]:
        return flat_shadow(self._shadow, self._bytes_per_block)

    def gauges(self) -> dict[str, int]:
        return {}

    def observed(self) -> dict[str, list[float]]:
        windows_s = self._shadow.take_windows()
        return {"shadow_window": windows_s} if windows_s else {}


class Deltas:
    """What has changed since the last question.

    Args:
        source: None where there is nothing to count (off, passing through).
        info: the labels of the info metric; told once, with the first record.
        predicted: the verdict's redundancy, 0 to 1, if there is one; told with it.
        kind: what it is told as.
    """

    def __init__(
        self,
        source: Source | None,
        info: dict[str, str] | None = None,
        predicted: float | None = None,
        kind: type[KVConnectorStats] = MooncakeStoreConnectorStats,
    ) -> None:
        self._source = source
        self._kind = kind
        self._told: dict[str, int] = {}
        self._first: Record = {}
        if info is not None:
            self._first["info"] = info
        if predicted is not None:
            self._first["set"] = {"predicted": predicted}

    def take(self) -> KVConnectorStats | None:
        """As vLLM takes it; None if there is nothing to say, which costs a step a microsecond or two."""
        record, self._first = self._first, {}
        source = self._source
        if source is not None and source.changed():
            now = source.counts()
            changed = {figure: n - self._told.get(figure, 0) for figure, n in now.items()}
            self._told = now
            parts: Record = {
                "add": {figure: n for figure, n in changed.items() if n},
                "set": record.get("set", {}) | source.gauges(),
                "saw": source.observed(),
            }
            record |= {name: part for name, part in parts.items() if part}
        return self._kind(data={KEY: [record]}) if record else None


def total(records: Iterable[Record]) -> dict[str, int]:
    """The counts of several steps together."""
    sums: Counter[str] = Counter()
    for record in records:
        sums.update(record.get("add", {}))
    return dict(sums)


class SingleFlightStats(MooncakeStoreConnectorStats):
    """The stock statistics and ours, as the front end merges them for vLLM's log line."""

    def is_empty(self) -> bool:
        """Whether the line would be; what the engine came to, and gauges, are not in it."""
        return not total(self.data.get(KEY, [])) and not self.data.keys() - {KEY}

    def reduce(self) -> dict[str, int | float]:
        ours = total(self.data.get(KEY, []))
        stock = MooncakeStoreConnectorStats(data={k: v for k, v in self.data.items() if k != KEY})
        return {**stock.reduce(), **{f"{KEY}_{figure}": n for figure, n in ours.items()}}


class WrappedSingleFlightStats(WrappedStats):
    """The same of a wrapped connector's."""

    def is_empty(self) -> bool:
        return not total(self.data.get(KEY, [])) and all(stats.is_empty() for stats in self.of_children())

    def reduce(self) -> dict[str, int | float]:
        ours = total(self.data.get(KEY, []))
        return {**super().reduce(), **{f"{KEY}_{figure}": n for figure, n in ours.items()}}
