"""Any connector as the rules see it: by the calls that vLLM makes of it, and by nothing else.

What the child is told is what vLLM would tell it if the blocks that a request adopts were local prefix-cache
hits: it is asked for what is behind them, and told the tokens that are left for it to load. What it must
promise for that is in docs/any-store.md; `matrix.py` lists those that do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from .sparse import Sparse
from .windows import held
from .wrapped import there_of

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .store import Answer

logger = init_logger(f"vllm.{__name__}")
_within_the_step = Sparse()


@dataclass(slots=True)
class _Asked:
    """The child's latest answer about a request."""

    request: Request
    behind: int
    """Tokens that it was told to be there."""
    answer: int | None


class Contract:
    """A `store.Store`.

    Args:
        child: the connector's scheduler side.
        loads_once: it loads no block twice at a time.
        asked_first: it must be asked about each request before it hears of its blocks.
    """

    drops_last = False
    parallel_loads = 1
    """Not known: nobody goes alone because a thread seems to be idle."""

    def __init__(
        self, child: KVConnectorBase_V1, block_size: int, asked_first: bool, loads_once: bool = False
    ) -> None:
        self._child = child
        self.block_size = block_size
        self.asked_first = asked_first
        self.loads_once = loads_once
        self._asked: dict[str, _Asked] = {}
        self._given: set[str] = set()
        """Requests that the child has heard the blocks of."""
        self._planned: dict[str, range] = {}
        self._new: dict[str, list[tuple[int, ...]]] = {}

    # -- the questions and orders ------------------------------------------------------------------------

    def ask(self, request: Request, num_local_tokens: int, pending: int = 0) -> Answer:
        """Only behind what is pending. So a child that waits while somebody else loads what it is asked for
        (OffloadingConnector) has nothing to wait for."""
        answer = self._behind(request, num_local_tokens + pending)
        if answer is None:
            return None, False
        return pending + answer, pending + answer > 0

    def alone(self, request: Request, num_local_tokens: int, answer: Answer) -> Answer:
        return self.ask(request, num_local_tokens)

    def narrow(self, request_id: str, first_token: int, own_tokens: int) -> int | None:
        asked = self._asked[request_id]
        if asked.behind == first_token:
            return own_tokens
        return self._behind(asked.request, first_token)

    def cut(self, request_id: str, end_token: int) -> None:
        raise NotImplementedError("no block is known to be broken, see `broken`")

    def withdraw(self, request_id: str) -> None:
        """Told with the request's blocks: 0 tokens. Until then a child may keep what it has found for it."""

    def withdraw_answers(self) -> None:
        """It is told of a reset itself, if the reset is about it."""

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> range | None:
        self._child.update_state_after_alloc(request, blocks, num_external_tokens)
        return self.given(request, blocks, num_external_tokens)

    def planned(self, request_id: str) -> range | None:
        return self._planned.get(request_id)

    def there(self, out: KVConnectorOutput) -> Mapping[str, int]:
        return there_of(out)

    def broken(self, out: KVConnectorOutput) -> Mapping[str, int]:
        """What a report by block says of the store is not known: a child may name all blocks of a load that
        has failed (LMCache). And it could not be told to load only what is before a broken one."""
        return {}

    # -- what the connector notes and asks ---------------------------------------------------------------

    def answered(self, request: Request, num_local_tokens: int, answer: int | None) -> None:
        """vLLM has asked the child, past us (shadow mode)."""
        self._asked[request.request_id] = _Asked(request, num_local_tokens, answer)

    def given(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> range | None:
        """The child has heard of the request's blocks. Returns what it loads of them; what it loads of the
        block behind that, which is not full, is nobody else's."""
        request_id = request.request_id
        self._given.add(request_id)
        self._planned.pop(request_id, None)
        asked = self._asked.pop(request_id, None)
        if not num_external_tokens:
            return None
        assert asked is not None, "chosen to load, but it has not been asked"
        first, end = asked.behind, asked.behind + num_external_tokens
        size = self.block_size
        destination = held(blocks, range(first // size, -(-end // size)))
        ids = [each if isinstance(each, tuple) else (each,) for each in destination]
        self._new[request_id] = [tuple(block.block_id for block in each if not block.is_null) for each in ids]
        # Of a full hit, the last token is computed once more, into the last block.
        self._planned[request_id] = range(first // size, min(end, request.num_tokens - 1) // size)
        return self._planned[request_id]

    def owed(self, request_id: str, num_tokens: int) -> bool:
        """Whether the child is owed a question about this request before it hears of its blocks.

        It is if none has been asked since it last heard of any, or if it was told that more is there than
        these tokens. LMCache would store the blocks of before, or more than is computed.
        """
        asked = self._asked.get(request_id)
        return self.asked_first and (asked is None or asked.behind > num_tokens)

    def starts_again(self, request_id: str) -> bool:
        """Whether the child has heard of blocks that the request does not have any more."""
        return request_id in self._given

    def take_new(self) -> dict[str, list[tuple[int, ...]]]:
        """The loads planned since the last call: request id -> the GPU blocks of each of its blocks."""
        new, self._new = self._new, {}
        return new

    def forget(self, request_id: str) -> None:
        """vLLM has finished the request."""
        self._asked.pop(request_id, None)
        self._given.discard(request_id)
        self._planned.pop(request_id, None)

    # -- inside ------------------------------------------------------------------------------------------

    def _behind(self, request: Request, num_tokens: int) -> int | None:
        """What the child has beyond these tokens, which it is told are there."""
        before = request.status
        if request.request_id in self._given:
            # It starts again, in other blocks: as after a preemption, which is how children know of it.
            request.status = RequestStatus.PREEMPTED
        try:
            answer, is_async = self._child.get_num_new_matched_tokens(request, num_tokens)
        finally:
            request.status = before
        if answer and not is_async:
            if requests := _within_the_step.due("within the step"):
                logger.warning(
                    "kv-singleflight: %s would load within the step, which cannot be shared: computed instead"
                    " (%d requests since the last such line).",
                    type(self._child).__name__,
                    requests,
                )
            answer = 0
        self._asked[request.request_id] = _Asked(request, num_tokens, answer)
        return answer
