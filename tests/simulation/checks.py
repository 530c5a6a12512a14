"""What must hold, whatever happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .violation import Violation

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from .content import Hashes
    from .memory import Memory


class Checks:
    """Watches one block pool and the memories behind it."""

    def __init__(self, pool: BlockPool, memories: list[Memory], hashes: Hashes) -> None:
        self._pool, self._memories, self._hashes = pool, memories, hashes
        self.unwritten: Callable[[], set[int]] = set
        """Blocks that forwards which are on their way will write to."""
        self._wrap()

    def _wrap(self) -> None:
        pool = self._pool
        stock_new, stock_free = pool.get_new_blocks, pool.free_blocks

        def get_new_blocks(count: int) -> list[KVCacheBlock]:
            blocks = stock_new(count)
            for block in blocks:
                self._given_away(block.block_id, "handed out")
            return blocks

        def free_blocks(ordered: Iterable[KVCacheBlock]) -> None:
            blocks = list(ordered)
            for block in blocks:
                if block.ref_cnt < 1 and not block.is_null:
                    raise Violation(f"block {block.block_id} is freed once too often")
            stock_free(blocks)
            for block in blocks:
                if block.ref_cnt == 0 and not block.is_null and block.block_hash is None:
                    self._given_away(block.block_id, "freed")

        pool.get_new_blocks = get_new_blocks  # type: ignore[method-assign]
        pool.free_blocks = free_blocks  # type: ignore[method-assign]

    def _given_away(self, block: int, how: str) -> None:
        for rank, memory in enumerate(self._memories):
            if block in memory.air:
                raise Violation(
                    f"block {block} is {how} while the load of {memory.air[block]} may still write to it"
                    f" on rank {rank}"
                )
            memory.poison(block)

    def cache(self) -> None:
        """Every entry of the prefix cache holds what its hash says, or is about to be written."""
        unwritten = self.unwritten()
        for key, found in self._pool.cached_block_hash_to_block._cache.items():
            right, group = None, int.from_bytes(key[-4:], "big")
            for block in found.values() if isinstance(found, dict) else (found,):
                if block.block_id in unwritten:
                    continue
                right = right or self._hashes.of(key[:-4], group)
                for rank, memory in enumerate(self._memories):
                    if memory.blocks[block.block_id] != right:
                        wrong = memory.difference(block.block_id, right)
                        raise Violation(
                            f"block {block.block_id} is in the prefix cache but wrong on rank {rank}: {wrong}"
                        )

    def cached(self) -> set[int]:
        """The blocks that are in the prefix cache."""
        entries = self._pool.cached_block_hash_to_block._cache.values()
        return {
            block.block_id
            for found in entries
            for block in (found.values() if isinstance(found, dict) else (found,))
        }

    def copies(self) -> Counter[object]:
        """Hash, as KV events name it -> blocks in the prefix cache that hold it."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        copies: Counter[object] = Counter()
        for key, found in self._pool.cached_block_hash_to_block._cache.items():
            block_hash = maybe_convert_block_hash(get_block_hash(key))
            copies[block_hash] += len(found) if isinstance(found, dict) else 1
        return copies
