"""A scripted child, and wrappers around it. vLLM is imported when the first is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from connector_patch import matrix
from tests.simulation import engine
from tests.simulation.setup import Setup


class FakeStats(KVConnectorStats):
    """Counts reads."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> FakeStats:
        return FakeStats({"reads": self.data["reads"] + other.data["reads"]})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class FakeChild(KVConnectorBase_V1, SupportsHMA):
    """Notes what it is called with, and answers what the test says."""

    answers: Any

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers = {}

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return f"layout of {vllm_config.kv_transfer_config.kv_connector}"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FakeStats:
        return FakeStats(data=data or {})


def _noting(name: str) -> Callable[..., Any]:
    def call(self: FakeChild, *given: Any, **named: Any) -> Any:
        self.calls.append((name, given, named))
        answer = self.answers.get(name)
        return answer(*given, **named) if callable(answer) else answer

    return call


METHODS = [
    name
    for name in dir(KVConnectorBase_V1)
    if not name.startswith("_")
    and callable(getattr(KVConnectorBase_V1, name))
    and name not in vars(FakeChild)
]
"""What vLLM calls on an instance of a connector, and on the class."""
CLASS_METHODS = {"get_required_kvcache_layout", "requires_piecewise_for_cudagraph"} | {
    "build_kv_connector_stats",
    "build_prom_metrics",
}
for _name in [*METHODS, "request_finished_all_groups"]:
    if _name not in CLASS_METHODS:
        setattr(FakeChild, _name, _noting(_name))
FakeChild.__abstractmethods__ = frozenset()


class FakeWithoutGroups(KVConnectorBase_V1):
    """A child for models of one KV-cache group only."""


FakeWithoutGroups.__abstractmethods__ = frozenset()
# Other tests of this process have several connectors: to them, these two are not beside theirs.
matrix.READ |= {"FakeChild", "FakeWithoutGroups"}  # type: ignore[misc]

CHILD = {"kv_connector": "FakeChild", "kv_connector_module_path": __name__}


def config(extra: dict[str, Any], **transfer: Any) -> Any:
    """vLLM's configuration with such a `kv_connector_extra_config`."""
    named = {"kv_connector": "SingleFlightConnector", "kv_role": "kv_both", **transfer}
    made = KVTransferConfig(kv_connector_extra_config=extra, **named)
    return engine.changed(engine._vllm_config(Setup(mode="stock"), None), kv_transfer_config=made)


def wrapper(mode: str = "off", *, role: KVConnectorRole = KVConnectorRole.SCHEDULER, **more: Any) -> Any:
    """A SingleFlightConnector around a FakeChild; nothing is bound to it."""
    from connector_patch.wrapper import SingleFlightConnector

    extra = {"connector": CHILD, "singleflight": {"mode": mode}, **more}
    return SingleFlightConnector(config(extra), role, engine._kv_cache_config(Setup()))
