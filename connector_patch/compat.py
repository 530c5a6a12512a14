"""May a mode be on here? Walks over the compatibility matrix (`matrix.py`), row by row.

Where it may not, the connector passes through: stock behaviour, and one log line with the sentence returned
here. Features are probed; a version string decides nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .config import Mode
from .matrix import BOUND, DEPLOYMENT, VLLM, WRAPPED, Row, beside_full

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Sizes(Protocol):
    """Of a store's scheduler side; named as vLLM's for Mooncake has them."""

    @property
    def _block_size(self) -> int: ...

    @property
    def _hash_block_size(self) -> int: ...

    @property
    def enable_partial_hash_hits(self) -> bool: ...


def missing_feature(mode: Mode = Mode.ATTACH) -> str | None:
    """What this vLLM lacks for the mode, as half a sentence; None if nothing."""
    return _reason(VLLM, mode)


def unsupported_setup(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, mode: Mode = Mode.ATTACH
) -> str | None:
    """What in the deployment the mode is not tested with; None if nothing."""
    return _reason(DEPLOYMENT, mode, vllm_config, kv_cache_config)


def deployment(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """The rows about deployments that this one is in."""
    return [row.name for row in DEPLOYMENT if row.asks(vllm_config, kv_cache_config)]


def around(child: str, config: VllmConfig, cache: KVCacheConfig, trusted: bool) -> list[str]:
    """The rows about connectors that are wrapped that this one is in."""
    return [row.name for row in WRAPPED if row.asks(child, config, cache, trusted)]


def unsupported_child(
    child: str, config: VllmConfig, cache: KVCacheConfig, trusted: bool, mode: Mode
) -> str | None:
    """What about the connector that is wrapped the mode is not tested with; None if nothing."""
    return _reason(WRAPPED, mode, child, config, cache, trusted)


def unsupported_manager(manager: KVCacheManager, sizes: Sizes, mode: Mode = Mode.ATTACH) -> str | None:
    """What about the bound cache manager the mode is not built for; None if nothing."""
    return _reason(BOUND, mode, manager, sizes)


def _reason(rows: Sequence[Row], mode: Mode, *asked: object) -> str | None:
    for row in rows:
        if mode not in row.on and (found := row.asks(*asked)):
            return row.reason.format(found)
    return None


def bytes_per_block(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one KV block, all layers and ranks; but not those of windowed groups beside full attention,
    of which a load brings few."""
    one_rank, windowed = 0, beside_full(kv_cache_config)
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if type(spec).__name__ == windowed:
            continue
        # A spec that stands for layers of several sizes has their sum already.
        layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
        one_rank += spec.page_size_bytes * layers
    return one_rank * vllm_config.parallel_config.world_size
