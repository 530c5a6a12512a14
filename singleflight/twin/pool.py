"""The GPU's KV blocks and the local prefix cache in them, as vLLM's block pool keeps them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NOTHING = -1
"""The name of a block whose content nobody can find."""
UNASKED = -2
"""And of a full one that nobody asks for, the generated part: evicted in its turn, as any cached one."""


class Pool:
    """Blocks 0 to `size` - 1, all free at first.

    - Free blocks queue; the next one handed out is the first. What it held is then no longer cached.
    - Blocks are given back tail first, so the tail of a chain is evicted before its head: those with a name
      to the end of the queue, those without to its front (`BlockPool.free_blocks`).
    - Several blocks may hold the same content; the one cached first is found (`BlockHashToBlockMap`).
    """

    def __init__(self, size: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self._name = [NOTHING] * size
        self._holders = [0] * size
        self._cached: dict[int, dict[int, None]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, name: int) -> int:
        """A block with this content; -1: there is none."""
        found = self._cached.get(name)
        return next(iter(found)) if found else -1

    def hit(self, names: Sequence[int], stop: int) -> list[int]:
        """The blocks of the longest prefix of names[:stop] that is cached."""
        blocks: list[int] = []
        for i in range(stop):
            if (block := self.find(names[i])) < 0:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these are free: to hold them takes as many from the queue."""
        return sum(not self._holders[block] for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int]:
        """So many free blocks, which must be there."""
        taken: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            name, self._name[block] = self._name[block], NOTHING
            if name >= 0:
                same = self._cached[name]
                del same[block]
                if not same:
                    del self._cached[name]
            self._holders[block] = 1
            taken.append(block)
        return taken

    def cache(self, block: int, name: int) -> None:
        """The block is full, or will be at the end of this step; one that has a name keeps it."""
        if self._name[block] == NOTHING:
            self._name[block] = name
            if name >= 0:
                self._cached.setdefault(name, {})[block] = None

    def give_back(self, blocks: Sequence[int]) -> None:
        """A request's blocks, front to back."""
        nameless: list[int] = []
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            self._free[block] = None
            if self._name[block] == NOTHING:
                nameless.append(block)
        for block in reversed(nameless):
            self._free.move_to_end(block, last=False)
