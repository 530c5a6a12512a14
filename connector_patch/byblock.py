"""A wrapped connector's failures by block become failures by request, on the worker.

vLLM takes every block of a load in the air to belong to one request. Where loads are shared it does not, so
vLLM must not hear of blocks. Each load's own blocks are known here: they came with the step that it began in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from .sparse import Sparse

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

logger = init_logger(f"vllm.{__name__}")
_nobodys = Sparse()


class Arrivals:
    """The loads that this rank has not reported the end of.

    Args:
        names_all: of a load that has failed the child names every block, and perhaps blocks before it
            (LMCache, whose chunks are longer). So a load of which some block is not named has not failed:
            those named belong to another's chunk.
    """

    def __init__(self, names_all: bool = False) -> None:
        self._names_all = names_all
        self._numbers: dict[str, dict[int, int]] = {}
        """Request id -> GPU block -> its number in the load."""
        self._there: dict[str, int] = {}

    def expect(self, loads: Mapping[str, Sequence[Iterable[int]]]) -> None:
        for request_id, blocks in loads.items():
            self._numbers[request_id] = {block: i for i, ids in enumerate(blocks) for block in ids}

    def heard(self, results: KVConnectorTransferResults, bad: set[int]) -> KVConnectorTransferResults:
        """The step's results, with those as failed that have a block among the bad ones."""
        failed, left = set(results.failed_recving), set(bad)
        for request_id, numbers in self._numbers.items() if bad else ():
            hit = bad & numbers.keys()
            if hit and (len(hit) == len(numbers) or not self._names_all):
                first = min(numbers[block] for block in hit)
                self._there[request_id] = min(self._there.get(request_id, first), first)
                failed.add(request_id)
                left -= hit
        if left and not self._names_all and (steps := _nobodys.due("nobody's block")):
            logger.warning(
                "kv-singleflight: blocks that nobody loads are said to have failed, such as %d: ignored (%d"
                " steps since the last such line).",
                min(left),
                steps,
            )
        for request_id in results.finished_recving:
            self._numbers.pop(request_id, None)
        return replace(results, failed_recving=failed)

    def take_there(self) -> dict[str, int]:
        """What is there of the loads that have failed since the last call."""
        there, self._there = self._there, {}
        return there
