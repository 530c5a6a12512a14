"""Counting on the real path: the probe, the demo, the tests and the benchmarks look through this.

Nothing is replaced by a fake. The real lookup client, load-spec table, receive queue and store are
wrapped in place, for stock and ours alike; the store's wrapper can also hold every Get at a barrier, or
slow it to the rate of a link.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector

BARRIER_TIMEOUT_S = 120.0
"""A held Get gives up after this long, so that a broken test ends."""
NULL_BLOCK = 0
"""vLLM's id of the block that stands where a windowed group has none (`NULL_BLOCK_ID`)."""


@dataclass
class Counts:
    """One burst's duplicated work, resource by resource."""

    lookups: int = 0
    load_specs: int = 0
    queue_entries: int = 0
    gets: int = 0
    keys: int = 0
    bytes: int = 0
    addresses: int = 0
    """Distinct destination addresses of the most widely copied block hash."""
    gpu_blocks: int = 0
    """Distinct GPU blocks allocated for tokens that come from outside."""

    def as_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Recorder:
    """What happened since the last `take`. The store's part is written by receive threads."""

    counts: Counts = field(default_factory=Counts)
    destinations: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Key -> addresses it was loaded to."""
    complete: list[list[str]] = field(default_factory=list)
    """The keys of each Get that the store has answered, in that order."""
    gpu_blocks: set[int] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    """Requests that went through the scheduler with tokens to come from outside."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> Counts:
        """The counts so far; everything starts at zero again."""
        with self.lock:
            counts, self.counts = self.counts, Counts()
            counts.addresses = max(map(len, self.destinations.values()), default=0)
            counts.gpu_blocks = len(self.gpu_blocks)
            self.destinations.clear()
            self.complete.clear()
            self.gpu_blocks.clear()
            self.waiting.clear()
        return counts


class InstrumentedStore:
    """The real store, its Gets counted, and held or slowed on request. Everything else passes through.

    The rate limit stands for a shared link of `bytes_per_s`: transfers take turns, each as long as its
    bytes need at that rate, and then the real transfer runs.
    """

    def __init__(self, store: Any, recorder: Recorder, gate: Gate) -> None:
        self._store = store
        self._recorder = recorder
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        total = sum(map(sum, sizes))
        with self._recorder.lock:
            self._recorder.counts.gets += 1
            self._recorder.counts.keys += len(keys)
            self._recorder.counts.bytes += total
            for key, parts in zip(keys, addresses, strict=True):
                self._recorder.destinations[key].add(parts[0])
        self._gate.pass_through(keys, total)
        result: list[int] = self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
        with self._recorder.lock:
            self._recorder.complete.append(list(keys))
        return result


class Gate:
    """What stands between a receive thread and the store: nothing, a barrier, or a link's rate.

    Attributes:
        open: the barrier; while it is clear, Gets that it concerns wait.
        concerns: which Gets the barrier holds, by their keys; all of them unless a test narrows it.
        bytes_per_s: the link's rate; None: no limit.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.concerns: Callable[[list[str]], bool] = lambda keys: True
        self.bytes_per_s: float | None = None
        self._turn = threading.Lock()
        self._busy_until = 0.0

    def holds(self, keys: list[str]) -> bool:
        """Whether the barrier stands before this Get now; for who can come again."""
        return self.concerns(keys) and not self.open.is_set()

    def turn_ends(self, size: int) -> float:
        """Queues for the link without waiting: the time (`time.monotonic`) when this transfer's turn is
        over."""
        if self.bytes_per_s is None:
            return 0.0
        self._busy_until = max(self._busy_until, time.monotonic()) + size / self.bytes_per_s
        return self._busy_until

    def pass_through(self, keys: list[str], size: int) -> None:
        if self.concerns(keys) and not self.open.wait(BARRIER_TIMEOUT_S):
            raise TimeoutError("the barrier was not opened")
        if self.bytes_per_s is not None:
            with self._turn:
                time.sleep(size / self.bytes_per_s)


class _CountingSpecs(dict[str, Any]):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __setitem__(self, request_id: str, spec: Any) -> None:
        self._recorder.counts.load_specs += 1
        super().__setitem__(request_id, spec)


def instrument(
    scheduler_side: MooncakeStoreConnector, worker_side: MooncakeStoreConnector
) -> tuple[Recorder, Gate]:
    """Wrap both sides of a running in-process engine's connector."""
    recorder, gate = Recorder(), Gate()
    scheduler, worker = scheduler_side.connector_scheduler, worker_side.connector_worker
    assert scheduler is not None
    assert worker is not None

    def lookup(*args: Any, stock: Callable[..., Any] = scheduler.client.lookup, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        recorder.counts.lookups += result is not None
        return result

    def put(item: Any, stock: Callable[..., Any] = worker.recv_request_queue.put) -> None:
        recorder.counts.queue_entries += 1
        stock(item)

    def allocated(
        request: Any,
        blocks: Any,
        external: int,
        stock: Callable[..., Any] = scheduler_side.update_state_after_alloc,
    ) -> None:
        stock(request, blocks, external)
        if external:
            count = -(-external // scheduler._block_size)
            for group in blocks.get_block_ids():
                recorder.gpu_blocks.update(group[-count:])
            recorder.gpu_blocks.discard(NULL_BLOCK)
            recorder.waiting.add(request.request_id)

    scheduler.client.lookup = lookup  # type: ignore[method-assign]
    scheduler.load_specs = _CountingSpecs(recorder)
    scheduler_side.update_state_after_alloc = allocated  # type: ignore[method-assign, assignment]
    worker.recv_request_queue.put = put  # type: ignore[method-assign, assignment]
    for thread in worker.kv_recv_threads:
        thread.store = InstrumentedStore(thread.store, recorder, gate)
    return recorder, gate
