"""What the rules need of a store's connector: a few questions and orders.

`mooncake.py` is Mooncake's, by its inside; `contract.py` is any connector's, by vLLM's calls alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

Answer = tuple[int | None, bool]
"""To `get_num_new_matched_tokens`: external tokens (None: ask again), and whether they load async."""


class Store(Protocol):
    """The scheduler side of one store. Called by the scheduler's thread only."""

    block_size: int
    """Tokens a block."""
    parallel_loads: int
    """Loads that the worker runs at a time."""
    drops_last: bool
    """Whether an answer leaves out the last block that it has found, as vLLM's own prefix cache does for
    drafters that read hidden states (EAGLE, MTP): what such a drafter has in the last slot of a block
    depends on the next token, which only a hit of the next block proves to be the same."""

    loads_once: bool
    """Whether it loads no block twice at a time: who needs one that is being loaded is asked again later."""

    asked_first: bool
    """Whether it must be asked about each request before vLLM allocates, even if there is nothing to ask."""

    def ask(self, request: Request, num_local_tokens: int, pending: int = 0) -> tuple[int | None, bool]:
        """Tokens that the store has beyond the local hit, and whether they load asynchronously.

        (None, False): the lookup is not ready. The answer is a plan to load these tokens. The first `pending`
        of them are being loaded by others: a store may take them for granted, and plan to load the rest.
        """

    def alone(self, request: Request, num_local_tokens: int, answer: Answer) -> Answer:
        """The request does not join those others: plan to load all of `answer`, which was `ask`'s."""

    def narrow(self, request_id: str, first_token: int, own_tokens: int) -> int | None:
        """Of what `ask` has planned, load only the tokens from `first_token` on, of which there are so many.

        Returns how many it will load; None: not ready, to be asked again.
        """

    def cut(self, request_id: str, end_token: int) -> None:
        """Of what `ask` has planned, load only the tokens before `end_token`, where a block ends."""

    def withdraw(self, request_id: str) -> None:
        """Load nothing for this request, and drop an answer that is on its way: it would be out of date."""

    def withdraw_answers(self) -> None:
        """Drop every answer that is on its way (a reset)."""

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> range | None:
        """vLLM has allocated, `num_external_tokens` of them for what the store was asked to load.

        Returns the blocks that the worker will be told to load, as a range of the request's block numbers;
        None if it loads nothing.
        """

    def planned(self, request_id: str) -> range | None:
        """The same blocks, from when vLLM has allocated until the worker has been told."""

    def there(self, out: KVConnectorOutput) -> Mapping[str, int]:
        """What workers tell in this step of loads that failed in part: request id -> how many of the first
        blocks are there. A step may be earlier than the one that reports the end of the load."""

    def broken(self, out: KVConnectorOutput) -> Mapping[str, int]:
        """The same: request id -> the first block of its load that the store could not read."""
