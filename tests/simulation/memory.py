"""The KV memory of one worker."""

from __future__ import annotations

from collections.abc import Sequence

from .content import IN_AIR, POISON, describe
from .violation import Violation


class Memory:
    """A list of contents for each block; and which blocks a load may be writing to."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [[POISON] * block_size for _ in range(blocks)]
        self.air: dict[int, str] = {}
        """Block -> the request whose load may write to it."""

    def poison(self, block: int) -> None:
        self.blocks[block] = [POISON] * self.block_size

    def queue_load(self, request: str, blocks: Sequence[int]) -> None:
        """From here on the load may write, until `end_load`."""
        for block in blocks:
            other = self.air.setdefault(block, request)
            if other != request:
                raise Violation(f"block {block} is loaded into by {other} and {request} at a time")

    def start_load(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.blocks[block] = [IN_AIR] * self.block_size

    def end_load(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.air.pop(block, None)

    def write(self, blocks: Sequence[int], first: int, contents: Sequence[int], who: str) -> None:
        """A forward writes `contents` into the slots from position `first` on of these blocks."""
        size = self.block_size
        for position, content in enumerate(contents, first):
            block = blocks[position // size]
            if block in self.air:
                raise Violation(f"{who} computes into block {block} while {self.air[block]} loads into it")
            self.blocks[block][position % size] = content

    def scribble(self, blocks: Sequence[int], first: int, end: int, who: str) -> None:
        """A drafter runs ahead, in the slots [first, end) of these blocks: nothing there is of use."""
        if end > len(blocks) * self.block_size:
            raise Violation(f"{who} drafts up to slot {end}, but has {len(blocks)} blocks")
        self.write(blocks, first, [POISON] * (end - first), who)

    def read(self, blocks: Sequence[int], first: int, end: int) -> list[int]:
        """What a forward sees in the slots [first, end)."""
        start, seen = first // self.block_size, []
        for block in blocks[start : -(-end // self.block_size)]:
            seen += self.blocks[block]
        return seen[first - start * self.block_size : end - start * self.block_size]

    def difference(self, block: int, right: Sequence[int]) -> str | None:
        """What is wrong with a block that should hold `right`; None if nothing."""
        held = self.blocks[block]
        if held == right:
            return None
        slot = next(i for i, (a, b) in enumerate(zip(held, right, strict=True)) if a != b)
        return f"slot {slot} holds {describe(held[slot])}, not {describe(right[slot])}"
