"""Every block that the prefix cache shows must hold what the store holds under the block's key.

A block's key is a hash of its tokens and all before them, so the key determines the content. `guard(engine)`
remembers which blocks became visible by a load; those must be equal byte for byte. Other visible blocks were
computed here, perhaps in another batch than the stored copy, and float32 sums depend on the batch's shape:
they must be close, which a block of another prefix, or half a block, is not (values here are about 1; other
content is off by as much, rounding by a hundred-thousandth of it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from connector_patch.lab import memory
from connector_patch.park import ParkScheduler

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine

TOLERANCE = 1e-3


class WrongBlock(AssertionError):
    """The prefix cache shows a block that does not hold its content."""


@dataclass
class Checked:
    loaded: int = 0
    computed: int = 0
    unstored: int = 0
    """Visible, but the store has no copy to compare with."""


@dataclass
class Guard:
    engine: Engine
    loaded: set[int] = field(default_factory=set)
    """Blocks that a landing has published and nobody has been given since."""

    def check(self) -> Checked:
        """Compare all visible blocks with the store. WrongBlock if one differs."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        worker = self.engine.worker_connector.connector_worker
        layout = worker.token_dbs[0].store_layout
        visible = [(layout.key_for(0, get_block_hash(key)), block_id) for key, block_id in shown(self.engine)]
        checked = Checked()
        for key, block_id in visible:
            # Of length 0 if the store has no such object, or its put is not complete.
            stored = worker.store.get(key)
            if not stored:
                checked.unstored += 1
                continue
            here = content(self.engine, block_id)
            if block_id in self.loaded:
                checked.loaded += 1
                right = here == stored
            else:
                checked.computed += 1
                right = len(here) == len(stored) and np.allclose(
                    np.frombuffer(here, np.float32),
                    np.frombuffer(stored, np.float32),
                    rtol=TOLERANCE,
                    atol=TOLERANCE,
                )
            if not right:
                how = "loaded" if block_id in self.loaded else "computed"
                raise WrongBlock(f"block {block_id} ({how}) does not hold what the store has as {key}")
        return checked


def shown(engine: Engine) -> Iterator[tuple[Any, int]]:
    """(hash with group, block id) of all that the prefix cache shows."""
    for key, found in engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache.items():
        for block in found.values() if isinstance(found, dict) else (found,):
            yield key, block.block_id


def regions(engine: Engine, block_id: int) -> Iterator[tuple[int, int]]:
    """(address, size) of the block's parts, in the order in which the store has them."""
    database = engine.worker_connector.connector_worker.token_dbs[0]
    addresses, sizes = database.prepare_value_for_block(block_id)
    return zip(addresses, sizes, strict=True)


def content(engine: Engine, block_id: int) -> bytes:
    return b"".join(memory.read(address, size) for address, size in regions(engine, block_id))


@contextlib.contextmanager
def guard(engine: Engine) -> Iterator[Guard]:
    """Watch what lands and what is given to somebody else; at the end, check all that is visible."""
    pool, attach = engine.scheduler.kv_cache_manager.block_pool, engine.connector.layer
    watching = Guard(engine)
    take = pool.get_new_blocks
    # Park mode publishes nothing itself, and knows no blocks: there all must be close.
    land = None if isinstance(attach, ParkScheduler) else attach._land

    def landed(leader: Any) -> Any:
        flight = attach.table._flights.get(leader.generation)
        left = land(leader)
        if flight is not None:
            watching.loaded.update(b.block_id for b in flight.destination if b.block_hash is not None)
        return left

    def given(count: int) -> Any:
        blocks = take(count)
        watching.loaded.difference_update(block.block_id for block in blocks)
        return blocks

    pool.get_new_blocks = given
    if land is not None:
        attach._land = landed
    try:
        yield watching
        watching.check()
    finally:
        del pool.get_new_blocks
        if land is not None:
            del attach._land
