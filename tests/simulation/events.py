"""The stream of KV events about GPU blocks, as a router follows it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .violation import Violation

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVEventBatch


class Stream:
    """Collects the engine's events; `check` reads them as a consumer does.

    Events about the store are left out: whoever else has put something there has not told this stream.
    """

    def __init__(self) -> None:
        self.events: list[object] = []

    def take(self, batch: KVEventBatch) -> None:
        self.events += batch.events

    def check(self, copies: Counter[object]) -> None:
        """Each parent is known when its child is stored, nothing is removed that was not stored, and what is
        left is what the prefix cache holds (`copies`: hash -> blocks that hold it). So nothing is stored
        twice, but for hashes that really are in two blocks. Raises Violation."""
        from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored

        held: Counter[object] = Counter()
        for number, event in enumerate(self.events):
            if isinstance(event, AllBlocksCleared):
                held.clear()
            elif isinstance(event, BlockStored) and event.medium == MEDIUM_GPU:
                parent = event.parent_block_hash
                if parent is not None and not held[parent]:
                    raise Violation(f"KV event {number}: stored after a parent that is not known: {event}")
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved) and event.medium == MEDIUM_GPU:
                for block_hash in event.block_hashes:
                    if not held[block_hash]:
                        raise Violation(f"KV event {number}: removed, but was not stored: {event}")
                    held[block_hash] -= 1
        if +held != copies:
            odd = {block_hash for block_hash in held | copies if held[block_hash] != copies[block_hash]}
            told = {block_hash: (held[block_hash], copies[block_hash]) for block_hash in odd}
            raise Violation(f"KV events: blocks of a hash as told and as they are: {told}")
