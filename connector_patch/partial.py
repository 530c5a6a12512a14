"""A load that failed in part: how many of its first blocks are there all the same, as every rank tells it.

A rank's word travels as worker metadata, with the end of the load or some steps before it; the scheduler side
keeps it until then. Ranks that say nothing have all blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreWorkerMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import KVCacheStoreRecvingThread
    from vllm.v1.outputs import KVConnectorOutput


@dataclass
class PartialLoads(MooncakeStoreWorkerMetadata):
    """The stock worker metadata of one step, and the loads that have failed since the last one."""

    there: dict[str, int] = field(default_factory=dict)
    """Request id -> how many of the first blocks of its load are there."""
    broken: dict[str, int] = field(default_factory=dict)
    """Request id -> the first block of its load that the store answered with a failure. Not the first that is
    not there: what comes after the first batch that fails is never asked for."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PartialLoads:
        """With another rank's word: what counts is what is there on all of them."""
        super().aggregate(other)
        if isinstance(other, PartialLoads):
            for request_id, blocks in other.there.items():
                self.there[request_id] = min(self.there.get(request_id, blocks), blocks)
            for request_id, block in other.broken.items():
                self.broken[request_id] = min(self.broken.get(request_id, block), block)
        return self


def told(output: KVConnectorOutput) -> Mapping[str, int]:
    """What the ranks have told in this step: request id -> blocks that are there."""
    meta = output.kv_connector_worker_meta
    return meta.there if isinstance(meta, PartialLoads) else {}


def found_broken(output: KVConnectorOutput) -> Mapping[str, int]:
    """The same of broken blocks: request id -> the first one of its load."""
    meta = output.kv_connector_worker_meta
    return meta.broken if isinstance(meta, PartialLoads) else {}


def first_block(thread: KVCacheStoreRecvingThread, request: ReqMeta, refused: set[str]) -> int | None:
    """The first block of this load one of whose keys is among those that were answered with a failure."""
    return next((i for i, keys in enumerate(_keys(thread, request)) if not refused.isdisjoint(keys)), None)


def blocks_there(thread: KVCacheStoreRecvingThread, request: ReqMeta, brought: set[str]) -> int:
    """How many of the first blocks of this load have each of their keys among those that were brought."""
    return sum(1 for _ in takewhile(brought.issuperset, _keys(thread, request)))


def _keys(thread: KVCacheStoreRecvingThread, request: ReqMeta) -> list[list[str]]:
    """The keys of each block of this load, made as the stock thread makes them, but in the order of the
    prompt: ranks rotate theirs, and what comes after the first batch that fails is never asked for.

    Of a windowed KV-cache group a load asks for the last few blocks only: the others have no key there."""
    spec, size = request.load_spec, thread.block_size
    assert spec is not None
    first = spec.vllm_cached_tokens // size
    keys: list[list[str]] = [[] for _ in range(first, spec.token_len // size)]
    masks = thread.coord.load_mask(request.block_hashes, spec.token_len)
    for group, mask, loads in zip(thread.token_databases, masks, thread.group_participates, strict=True):
        layout = group.store_layout
        for start, _, chunk_hash in group.process_tokens(spec.token_len, request.block_hashes, first * size):
            if loads and mask[start // size]:
                shards = layout.local_shard_ids
                keys[start // size - first] += [layout.key_for(shard, chunk_hash) for shard in shards]
    return keys
