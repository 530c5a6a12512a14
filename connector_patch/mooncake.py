"""Mooncake's store as the rules see it: vLLM's own scheduler side of `MooncakeStoreConnector`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm import envs

from . import partial

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .store import Answer


class MooncakeStore:
    """A `store.Store`. The only place that reaches into the stock scheduler side's load specs and lookups."""

    asked_first = False
    loads_once = False

    def __init__(self, stock: MooncakeStoreScheduler, drops_last: bool = False) -> None:
        self._stock = stock
        self.drops_last = drops_last
        self.block_size: int = stock._block_size
        self.parallel_loads: int = envs.VLLM_MOONCAKE_LOAD_RECV_THREADS

    def ask(self, request: Request, num_local_tokens: int, pending: int = 0) -> Answer:
        """A lookup is about the whole prompt: what it finds of `pending` costs nothing."""
        return self._stock.get_num_new_matched_tokens(request, num_local_tokens)

    def alone(self, request: Request, num_local_tokens: int, answer: Answer) -> Answer:
        return answer

    def narrow(self, request_id: str, first_token: int, own_tokens: int) -> int:
        self._stock.load_specs[request_id].vllm_cached_tokens = first_token
        return own_tokens

    def cut(self, request_id: str, end_token: int) -> None:
        spec = self._stock.load_specs[request_id]
        spec.kvpool_cached_tokens = end_token
        # Where in the last block the hit ends, with hashes finer than blocks: that block is not loaded now.
        spec.tail_key_boundaries = ()

    def withdraw(self, request_id: str) -> None:
        self._stock.load_specs.pop(request_id, None)
        self._stock.client.discard(request_id)  # asked in an earlier pass (lookup_async)

    def withdraw_answers(self) -> None:
        for request_id in list(self._stock.client.futures):
            self._stock.client.discard(request_id)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> range | None:
        self._stock.update_state_after_alloc(request, blocks, num_external_tokens)
        return self.planned(request.request_id)

    def there(self, out: KVConnectorOutput) -> Mapping[str, int]:
        return partial.told(out)

    def broken(self, out: KVConnectorOutput) -> Mapping[str, int]:
        return partial.found_broken(out)

    def planned(self, request_id: str) -> range | None:
        """The blocks that the worker will be told to load, since vLLM has given them room."""
        spec = self._stock.load_specs.get(request_id)
        if spec is None or not spec.can_load:
            return None
        return range(spec.vllm_cached_tokens // self.block_size, spec.kvpool_cached_tokens // self.block_size)
