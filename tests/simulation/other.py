"""A second connector beside ours, as vLLM's MultiConnector has them: it loads, fails and sends.

It behaves as vLLM's own do. Like a P/D connector it loads asynchronously, reports a failure by request or by
block, and keeps the blocks of a finished request until they are sent; or like ExampleConnector it loads
within the step.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from .content import RUBBISH

if TYPE_CHECKING:
    from .setup import Setup
    from .worker import Worker

SEND_S = 0.03
"""From the end of a request to when its blocks are sent."""


@dataclass
class Shelf:
    """What the other connector has, and what has become of it; one for all its workers."""

    setup: Setup
    right: Callable[[bytes], list[int]]
    """The contents of the block with this hash."""
    log: Callable[[str], None]
    held: set[bytes] = field(default_factory=set)
    loaded: Counter[str] = field(default_factory=Counter)
    """Tokens, by request."""
    failed: Counter[str] = field(default_factory=Counter)
    """Loads that have failed, by request: each rank's counted."""

    def draw(self, *what: object) -> int:
        return zlib.crc32(f"{self.setup.timing} {what}".encode())


@dataclass
class Load:
    """One load on its way."""

    request: str
    hashes: list[bytes]
    blocks: list[int]
    due: float = 0.0
    fails: bool = False


class Plan(KVConnectorMetadata):
    """What the workers are to load and to send, as of this step."""

    def __init__(self, loads: list[Load], sends: list[str]) -> None:
        self.loads, self.sends = loads, sends


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides of it. `worker` is set on the worker's."""

    worker: Worker

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.shelf: Shelf = vllm_config.kv_transfer_config.kv_connector_extra_config["shelf"]
        self._size: int = self.shelf.setup.block_size
        self._asked: Counter[str] = Counter()
        self._found: dict[str, range] = {}
        self._planned = Plan([], [])
        self.in_air: list[Load] = []
        self._sends: dict[str, float] = {}
        self._bad_blocks: set[int] = set()
        self._has_failed: set[str] = set()
        """Requests whose load fails once, not for ever: vLLM would ask and load for ever."""

    # -- scheduler side ----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        name, setup = request.request_id, self.shelf.setup
        self._asked[name] += 1
        if setup.lookup_async and self.shelf.draw("asked", name, self._asked[name]) % 3 == 0:
            return None, False
        first = end = num_computed_tokens // self._size
        stop = (request.num_tokens - 1) // self._size
        while end < stop and bytes(request.block_hashes[end]) in self.shelf.held:
            end += 1
        self._found[name] = range(first, end)
        return (end - first) * self._size, setup.other_loads == "async" and end > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        found = self._found.pop(request.request_id, range(0))
        if not num_external_tokens:
            return
        assert num_external_tokens == len(found) * self._size, "chosen for what it has not found"
        hashes = [bytes(h) for h in request.block_hashes[found.start : found.stop]]
        ids = blocks.get_block_ids()[0][found.start : found.stop]
        self._planned.loads.append(Load(request.request_id, hashes, ids))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        planned, self._planned = self._planned, Plan([], [])
        return planned

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Like vLLM's, it sends what has come to its end, and not what was aborted."""
        self._asked.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        sent = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        sent = sent and self.shelf.draw("sent", request.request_id) % 3 == 0
        if sent:
            self._planned.sends.append(request.request_id)
        return sent, None

    # -- worker side -------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        setup, worker = self.shelf.setup, self.worker
        self._sends.update((request, worker.now + SEND_S) for request in plan.sends)
        for planned in plan.loads:
            load = Load(planned.request, planned.hashes, planned.blocks)
            worker.memory.queue_load(f"{load.request} (the other connector)", load.blocks)
            if setup.other_loads == "sync":
                worker.forward.before.append((load.blocks, functools.partial(self._end, load)))
                continue
            draw = self.shelf.draw(load.request, worker.rank)
            load.due = worker.now + setup.load_s * (1 + draw % 4)
            load.fails = setup.other_fails and draw % 5 == 0 and load.request not in self._has_failed
            if load.fails:
                self._has_failed.add(load.request)
            if worker.holding:
                load.due = float("inf")
            worker.memory.start_load(load.blocks)
            self.in_air.append(load)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        now, results = self.worker.now, KVConnectorTransferResults()
        ended = [load for load in self.in_air if load.due <= now]
        self.in_air = [load for load in self.in_air if load.due > now]
        for load in ended:
            self._end(load)
            results.finished_recving.add(load.request)
            if load.fails and self.shelf.draw("how", load.request) % 2:
                results.failed_recving.add(load.request)
            elif load.fails:
                self._bad_blocks.update(load.blocks[len(load.blocks) // 2 :])
        results.finished_sending = {request for request, due in self._sends.items() if due <= now}
        self._sends = {request: due for request, due in self._sends.items() if due > now}
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def next_event(self) -> float:
        return min((*(load.due for load in self.in_air), *self._sends.values()), default=float("inf"))

    def _end(self, load: Load) -> None:
        memory = self.worker.memory
        good = len(load.blocks) // 2 if load.fails else len(load.blocks)
        for i, (block, block_hash) in enumerate(zip(load.blocks, load.hashes, strict=True)):
            memory.blocks[block] = list(self.shelf.right(block_hash)) if i < good else [RUBBISH] * self._size
        memory.end_load(load.blocks)
        self.shelf.log(f"the other connector's load of {load.request} ends" + (", failed" * load.fails))
        self.shelf.failed[load.request] += load.fails
        if self.worker.rank == 0:
            self.shelf.loaded[load.request] += good * self._size

    # -- nothing to do here ------------------------------------------------------------------------------

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None: ...

    def wait_for_save(self) -> None: ...
