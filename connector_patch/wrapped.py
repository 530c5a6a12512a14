"""Our metadata and statistics around those of a wrapped connector: each has the child's own inside it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass
class StepMetadata(KVConnectorMetadata):
    """To the worker: one step. That it comes at all says that attach or park mode is on."""

    child: KVConnectorMetadata
    acknowledge: frozenset[str]
    """Requests to report as received."""
    loads: dict[str, list[tuple[int, ...]]]
    """Loads that begin: request id -> the GPU blocks of each of its blocks."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers: what is there of loads that failed since the last step."""

    child: KVConnectorWorkerMetadata | None
    there: dict[str, int] = field(default_factory=dict)
    """Request id -> how many of the first blocks of its load are there; of several ranks, on all of them."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        if self.child is None:
            self.child = other.child
        elif other.child is not None:
            self.child = self.child.aggregate(other.child)
        for request_id, blocks in other.there.items():
            self.there[request_id] = min(self.there.get(request_id, blocks), blocks)
        return self


def there_of(out: KVConnectorOutput) -> Mapping[str, int]:
    """What the ranks have told in this step."""
    meta = out.kv_connector_worker_meta
    return meta.there if isinstance(meta, WorkerMetadata) else {}


class WrappedStats(KVConnectorStats):
    """Ours under `metrics.KEY`, a list that grows, and the child's under its class: `module:name`."""

    @classmethod
    def of_child(cls, kind: type, stats: KVConnectorStats) -> Self:
        return cls(data={f"{kind.__module__}:{kind.__qualname__}": stats})

    @classmethod
    def received(cls, data: Mapping[str, Any]) -> Self:
        """From `to_dict`, in the front end."""
        made: dict[str, Any] = {}
        for name, value in data.items():
            if ":" not in name or isinstance(value, KVConnectorStats):
                made[name] = value
            elif (stats := kind_named(name).build_kv_connector_stats(data=value)) is not None:
                made[name] = stats
        return cls(data=made)

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value.to_dict() if isinstance(value, KVConnectorStats) else value
            for name, value in self.data.items()
        }

    def aggregate(self, other: KVConnectorStats) -> Self:
        for name, value in other.data.items():
            if name not in self.data:
                self.data[name] = value
            elif isinstance(value, KVConnectorStats):
                self.data[name] = self.data[name].aggregate(value)
            else:
                self.data[name] = [*self.data[name], *value]
        return self

    def reset(self) -> None:
        self.data = {}

    def of_children(self) -> Iterator[KVConnectorStats]:
        yield from (value for value in self.data.values() if isinstance(value, KVConnectorStats))

    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return all(
            value.is_empty() if isinstance(value, KVConnectorStats) else not value
            for value in self.data.values()
        )

    def reduce(self) -> dict[str, int | float]:
        sums: dict[str, int | float] = {}
        for stats in self.of_children():
            sums |= stats.reduce()
        return sums


def kind_named(name: str) -> Any:
    """The class under whose name statistics are."""
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found
