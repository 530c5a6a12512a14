"""Counting and holding LMCache's loads, as `instrument.py` does it with Mooncake's: on the real path, in
place.

Only where loads are asynchronous (`lmcache.mp.mp_transfer_mode: lmcache_driven`, a GPU's default): a held
load is one whose request has not been sent to the server yet. `take` fills the same counts.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .instrument import Gate, Recorder

if TYPE_CHECKING:
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

LOOKUP_S = 30.0
_probes = itertools.count()


def lmcache_of(connector: Any) -> LMCacheMPConnector | None:
    """The connector itself, or the one that ours wraps, if it is LMCache's."""
    inner = getattr(connector, "child", connector)
    return inner if type(inner).__name__ == "LMCacheMPConnector" else None


def instrument(outer: Any, scheduler_side: LMCacheMPConnector, worker_side: LMCacheMPConnector) -> Bed:
    """Wrap both sides of a running in-process engine's connector; `outer` is what vLLM calls."""
    recorder, gate = Recorder(), Gate()
    scheduler, worker = scheduler_side.scheduler_adapter, worker_side.worker_adapter
    caches = list(worker.kv_caches.values())
    block_size = scheduler_side._group_tokens_per_block[0]
    per_block = sum(cache.nbytes for cache in caches) // caches[0].shape[0]

    def retrieve(
        stock: Callable[..., Any],
        request_id: str,
        key: Any,
        caches: Any,
        block_ids: Sequence[Sequence[int]],
        *more: Any,
        skip_first_n_tokens: int = 0,
    ) -> _Held:
        first = (key.start + skip_first_n_tokens) // block_size
        written = block_ids[0][first - key.start // block_size :]
        with recorder.lock:
            recorder.counts.gets += 1
            recorder.counts.keys += (key.end - key.start) // scheduler.lmcache_tokens_per_chunk
            recorder.counts.bytes += len(written) * per_block
            recorder.gpu_blocks.update(written)
            names = _names(key.token_ids, block_size, first, len(written))
            for name, block in zip(names, written, strict=True):
                recorder.destinations[name].add(block)

        def send() -> Any:
            return stock(request_id, key, caches, block_ids, *more, skip_first_n_tokens=skip_first_n_tokens)

        return _Held(send, gate, [request_id], len(written) * per_block)

    def queued(*args: Any, stock: Callable[..., Any] = worker.submit_retrieve_request, **named: Any) -> None:
        recorder.counts.queue_entries += 1
        stock(*args, **named)

    def allocated(
        request: Any,
        blocks: Any,
        external: int,
        *more: Any,
        stock: Callable[..., Any] = outer.update_state_after_alloc,
    ) -> None:
        stock(request, blocks, external, *more)
        tracker = scheduler_side.request_trackers[request.request_id]
        recorder.counts.load_specs += tracker.is_ready_for_retrieving()
        if external:
            recorder.waiting.add(request.request_id)

    for client in scheduler.req_clients.values():

        def lookup(*args: Any, stock: Callable[..., Any] = client.lookup, **named: Any) -> Any:
            recorder.counts.lookups += 1
            return stock(*args, **named)

        client.lookup = lookup
    _around_retrieves(worker, retrieve)
    worker.submit_retrieve_request = queued
    outer.update_state_after_alloc = allocated
    return Bed(recorder, gate, scheduler_side)


def slow(worker_side: LMCacheMPConnector, gate: Gate) -> None:
    """Have the loads of a worker side wait for the gate, and nothing counted."""
    worker = worker_side.worker_adapter
    caches = list(worker.kv_caches.values())
    per_block = sum(cache.nbytes for cache in caches) // caches[0].shape[0]

    def retrieve(
        stock: Callable[..., Any],
        request_id: str,
        key: Any,
        caches: Any,
        block_ids: Any,
        *more: Any,
        **named: Any,
    ) -> _Held:
        def send() -> Any:
            return stock(request_id, key, caches, block_ids, *more, **named)

        return _Held(send, gate, [request_id], len(block_ids[0]) * per_block)

    _around_retrieves(worker, retrieve)


def _around_retrieves(worker: Any, retrieve: Callable[..., Any]) -> None:
    """Put it around what sends retrieves, also when LMCache makes a new one: as it finds its server again."""
    register = worker._send_register_kv_caches_request

    def wrap() -> None:
        transfer = worker.transfer_ctx
        transfer.submit_retrieve = functools.partial(retrieve, transfer.submit_retrieve)

    def registered(*args: Any, **named: Any) -> None:
        register(*args, **named)
        wrap()

    worker._send_register_kv_caches_request = registered
    wrap()


class Bed:
    """What the lab sees of an engine's LMCache."""

    def __init__(self, recorder: Recorder, gate: Gate, scheduler_side: LMCacheMPConnector) -> None:
        self.recorder, self.gate = recorder, gate
        self._adapter = scheduler_side.scheduler_adapter

    def stored(self, prompt: Sequence[int]) -> bool:
        """Whether the server has all whole chunks of the prompt; asked as a request would, and released."""
        adapter, probe = self._adapter, f"probe-{next(_probes)}"
        adapter.maybe_submit_lookup_request(probe, token_ids=list(prompt))
        limit = time.monotonic() + LOOKUP_S
        while (found := adapter.check_lookup_result(probe)) is None:
            if time.monotonic() > limit:
                raise TimeoutError(f"LMCache did not answer a lookup in {LOOKUP_S:.0f} s")
            time.sleep(0.001)
        adapter.cleanup_lookup_result(probe)
        if found:
            adapter.free_lookup_locks(list(prompt), 0, found, probe)
        adapter.end_session(probe)
        whole = len(prompt) // adapter.lmcache_tokens_per_chunk * adapter.lmcache_tokens_per_chunk
        return bool(found >= whole)


class _Held:
    """The future of a retrieve that is sent once the gate lets it; LMCache's worker polls it in every
    step."""

    def __init__(self, send: Callable[[], Any], gate: Gate, names: list[str], size: int) -> None:
        self._send, self._gate, self._names = send, gate, names
        self._after = gate.turn_ends(size)
        self._sent: Any = None
        self._pass()

    def _pass(self) -> None:
        if self._sent is None and not self._gate.holds(self._names) and time.monotonic() >= self._after:
            self._sent = self._send()

    def query(self) -> bool:
        self._pass()
        return self._sent is not None and bool(self._sent.query())

    def result(self, timeout: float | None = None) -> Any:
        return self._sent.result(timeout=timeout)


def _names(tokens: Sequence[int], block_size: int, first: int, count: int) -> list[str]:
    """What each of these blocks holds, as one name for each content."""
    names, before = [], 0
    for i in range(first + count):
        before = hash((before, tuple(tokens[i * block_size : (i + 1) * block_size])))
        names.append(str(before))
    return names[first:]
