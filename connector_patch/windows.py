"""Models with sliding-window or chunked groups beside full attention: what of each group a request needs.

A request whose hit ends at block `end` needs all blocks before it of the full-attention groups, and of a
windowed group only the last few: its table begins with vLLM's null block (`get_num_skipped_tokens`). So a
load brings those last few and no others, and who adopts from it must find there what its own end needs.
Block numbers are those of the request; all groups have blocks of one size (`matrix.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


class Stretch(Protocol):
    """Blocks [first, end) of a request, with what holds each: see `held`."""

    first: int
    end: int

    @property
    def destination(self) -> Sequence[Any]: ...


def held(blocks: KVCacheBlocks, span: range) -> Sequence[Any]:
    """What holds each of these blocks of a request: its GPU block; in a model of several groups a tuple, one
    GPU block of each group, which may be the null block."""
    groups = [group[span.start : span.stop] for group in blocks.blocks]
    return groups[0] if len(groups) == 1 else list(zip(*groups, strict=True))


class Windows:
    """The windowed groups of a model; false if it has none.

    Args:
        skipped: group -> how many of its first blocks a request does not need there whose hit ends at a
            block.
        full: a group of full attention.
        block_size: tokens a block.
    """

    def __init__(
        self, skipped: dict[int, Callable[[int], int]] | None = None, full: int = 0, block_size: int = 0
    ) -> None:
        self._skipped = skipped or {}
        self.full = full
        self._block_size = block_size

    @classmethod
    def of(cls, manager: KVCacheManager) -> Windows:
        """Those of the model that this manager is for."""
        from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

        groups = manager.coordinator.single_type_managers
        skipped, full = {}, []
        for group, one in enumerate(groups):
            if type(one).get_num_skipped_tokens is SingleTypeKVCacheManager.get_num_skipped_tokens:
                full.append(group)
            else:
                skipped[group] = _in_blocks(one)
        return cls(skipped, full[0] if full else 0, groups[0].block_size)

    def __bool__(self) -> bool:
        return bool(self._skipped)

    def covered(self, run: Stretch) -> bool:
        """Whether a request whose hit ends where the run does finds all that it needs of the run's blocks."""
        return next(self._gaps(run, run.end, run.end), None) is None

    def adoptable(self, run: Stretch, end: int) -> int:
        """Where to stop adopting blocks of the run, for a request whose hit ends at block `end` and which can
        load what it does not adopt: at the first block that its windows need and that is not there."""
        if not self or (end <= run.end and self.covered(run)):
            return run.end
        return min(*self._gaps(run, end, run.end), run.end, max(end, run.first))

    def standing(self, run: Stretch) -> int:
        """The last end that a hit which consists of blocks of the run alone can have; its `first` if none."""
        end = run.end
        while end > run.first and (gap := max(self._gaps(run, end, end), default=None)) is not None:
            end = gap  # any end after it needs it too: windows move on with the end
        return end

    def serve(self, planned: int, end: int) -> bool:
        """Whether a request that has been given blocks for a hit up to `planned` can go on from `end`: it has
        all blocks that it needs there, and those that it computes into."""
        return all(skipped(end) == skipped(planned) for skipped in self._skipped.values())

    def keep(self, request: Request, end: int) -> None:
        """Have vLLM keep the windows at this end in the prefix cache, for those who join: by its default it
        keeps only those at the end of a prompt (`prefix_cache_retention_interval`)."""
        if self:
            request.shared_prefix_boundary = end * self._block_size

    def _gaps(self, run: Stretch, end: int, stop: int) -> Iterator[int]:
        """The blocks of the run before `stop` that a hit which ends at `end` needs and that are not there."""
        destination = run.destination if self else ()
        for group, skipped in self._skipped.items():
            for i in range(max(skipped(end), run.first), stop):
                if destination[i - run.first][group].is_null:
                    yield i


def _in_blocks(one: Any) -> Callable[[int], int]:
    size = one.block_size
    return lambda end: one.get_num_skipped_tokens(end * size) // size
