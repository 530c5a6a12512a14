"""A connector that is another one: every call of vLLM's base class goes to the child as it came."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)

from . import child

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

OWN = frozenset({"role", "has_connector_metadata"})
"""Public names of the base class that are about the connector itself, and not what a store does."""


def _call(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(KVConnectorBase_V1, name), updated=())
    def call(self: Delegate, *given: Any, **named: Any) -> Any:
        return getattr(self.child, name)(*given, **named)

    return call


def _value(name: str) -> property:
    return property(lambda self: getattr(self.child, name))


def _forwarded() -> dict[str, Any]:
    """Whatever this vLLM calls on an instance of a connector."""
    made: dict[str, Any] = {}
    for name in (name for name in dir(KVConnectorBase_V1) if not name.startswith("_")):
        found = inspect.getattr_static(KVConnectorBase_V1, name)
        if name in OWN or isinstance(found, classmethod):
            continue
        made[name] = _value(name) if isinstance(found, property) else _call(name)
    return made


class Delegate(KVConnectorBase_V1, SupportsHMA):
    """The connector that `kv_connector_extra_config.connector` names, as MultiConnector names its children.

    Attributes:
        child: it.
        child_config: the configuration that it was made with.

    Raises ValueError where there is none, or one that cannot be a child.
    """

    vars().update(_forwarded())

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        kind, self.child_config = child.named(vllm_config)
        if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and not supports_hma(kind):
            # vLLM asks our class, which does; and would have turned it off for the child's.
            raise ValueError(
                f"{child.WHERE}: {kind.__name__} does not support vLLM's hybrid KV-cache manager;"
                " start with --disable-hybrid-kv-cache-manager"
            )
        self.child = self.make_child(kind, kv_cache_config, role)

    def make_child(
        self, kind: type[KVConnectorBase_V1], kv_cache_config: KVCacheConfig, role: KVConnectorRole
    ) -> KVConnectorBase_V1:
        return kind(self.child_config, role, kv_cache_config)

    # -- what goes to both ------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
        self.child.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        KVConnectorBase_V1.clear_connector_metadata(self)
        self.child.clear_connector_metadata()

    # -- of the hybrid KV-cache manager ------------------------------------------------------------------

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...], *more: Any, **named: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(self.child, SupportsHMA):
            return self.child.request_finished_all_groups(request, block_ids, *more, **named)
        (of_the_group,) = block_ids
        return self.child.request_finished(request, of_the_group, *more, **named)

    # -- asked of the class ------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        kind, config = child.named(vllm_config)
        return kind.get_required_kvcache_layout(config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        kind, given = child.kind_of(extra_config)
        return kind.requires_piecewise_for_cudagraph(given.get("kv_connector_extra_config", {}))
