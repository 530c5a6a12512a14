"""The real store behind a script: the next Gets meet exactly the fault a test asks for.

`ScriptedStore` stands between our receive threads and the real store, below everything of ours. A fault
concerns the Gets that `when(keys)` picks, the next `times` of them. Gets that no fault concerns go through.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from connector_patch.lab import memory

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine

HANG_S = 120.0
"""A Get that is to hang for ever gives up after this, so that a broken test ends."""

RUBBISH = 0x4B
"""0x4B4B4B4B is 13 million as float32: a block of it changes every token."""

Get = Callable[[], list[int]]


@dataclass
class Fault:
    """What happens to a Get. `act(get, keys, addresses, sizes)` answers in the store's place.

    `reached` is set when a Get meets the fault; `release` lets a held or hanging one go; `left` is set when
    the Get's last byte has been written and its answer is on its way.
    """

    act: Callable[[Get, list[str], list[list[int]], list[list[int]]], list[int]]
    times: int = 1
    when: Callable[[list[str]], bool] = lambda keys: True
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)


def hang(
    times: int = 1, *, when: Callable[[list[str]], bool] = lambda keys: True, then: Fault | None = None
) -> Fault:
    """The Get does not complete until `release`, and then it does what it would have done, or `then`."""
    fault = Fault(lambda get, keys, addresses, sizes: [], times, when)

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        fault.release.wait(HANG_S)
        return get() if then is None else then.act(get, keys, addresses, sizes)

    fault.act = act
    return fault


def silent_after(count: int) -> Fault:
    """The first `count` keys arrive, and then nothing more, until `release`: then the Get completes."""
    fault = Fault(lambda get, keys, addresses, sizes: [])

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        get()
        _overwrite(addresses[count:], sizes[count:])
        fault.reached.set()
        fault.release.wait(HANG_S)
        return get()

    fault.act = act
    return fault


def scribble(code: int = -704) -> Fault:
    """Every byte of every destination becomes rubbish, and the store answers with an error for each key."""

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        _overwrite(addresses, sizes)
        return [code] * len(keys)

    return Fault(act)


def _overwrite(addresses: list[list[int]], sizes: list[list[int]]) -> None:
    for parts, lengths in zip(addresses, sizes, strict=True):
        for address, size in zip(parts, lengths, strict=True):
            memory.fill(address, RUBBISH, size)


def fail_keys(*indices: int, code: int = -704, times: int = 1) -> Fault:
    """These keys (all, if none is named) are answered with an error code; the others are loaded."""

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        answers = get()
        return [code if not indices or i in indices else answer for i, answer in enumerate(answers)]

    return Fault(act, times)


def unreadable(*hashes: bytes, code: int = -704) -> Fault:
    """The keys of these blocks are listed in the store, and no Get ever brings them."""
    endings = tuple(block_hash.hex() for block_hash in hashes)

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        answers = get()
        bad = [i for i, key in enumerate(keys) if key.endswith(endings)]
        _overwrite([addresses[i] for i in bad], [sizes[i] for i in bad])
        return [code if i in bad else answer for i, answer in enumerate(answers)]

    return Fault(act, sys.maxsize, lambda keys: any(key.endswith(endings) for key in keys))


def raise_(error: BaseException, times: int = 1) -> Fault:
    """The Get raises. SystemExit is how a thread dies."""

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        raise error

    return Fault(act, times)


def short_read(index: int = 0, times: int = 1) -> Fault:
    """One key brings half of its bytes, and the store says so; the other half of the block is rubbish."""

    def act(get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        answers = get()
        for address, size in zip(addresses[index], sizes[index], strict=True):
            memory.fill(address + size // 2, 0x7B, size - size // 2)
        answers[index] //= 2
        return answers

    return Fault(act, times)


def answer_nothing(times: int = 1) -> Fault:
    """The store answers for no key at all, as if the list had been lost."""
    return Fault(lambda get, keys, addresses, sizes: [], times)


class ScriptedStore:
    """Everything but the Get passes through to the real store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.faults: list[Fault] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        def get() -> list[int]:
            answers: list[int] = self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
            return answers

        with self._lock:
            fault = next((f for f in self.faults if f.times > 0 and f.when(keys)), None)
            if fault is not None:
                fault.times -= 1
        if fault is None:
            return get()
        fault.reached.set()
        try:
            return fault.act(get, keys, addresses, sizes)
        finally:
            fault.left.set()


@contextlib.contextmanager
def scripted(engine: Engine, *faults: Fault) -> Iterator[ScriptedStore]:
    """Put these faults before the engine's store; at the end, every held Get is released."""
    below = [_lowest(thread) for thread in engine.worker_connector.connector_worker.kv_recv_threads]
    store = ScriptedStore(below[0]._store)
    store.faults.extend(faults)
    for wrapper in below:
        wrapper._store = store
    try:
        yield store
    finally:
        for fault in store.faults:
            fault.release.set()
        engine.settle()
        for wrapper in below:
            wrapper._store = store._store


@contextlib.contextmanager
def at_once(engine: Engine) -> Iterator[None]:
    """Every load ends inside the call that submits it, on the engine's own thread."""
    worker = engine.worker_connector.connector_worker
    queue, thread = worker.recv_request_queue, worker.kv_recv_threads[0]
    before = queue.put

    def put(item: Any) -> None:
        with queue.mutex:
            queue.unfinished_tasks += 1  # the handler says when it is done
        thread._handle_request(item)

    queue.put = put
    try:
        yield
    finally:
        queue.put = before


def _lowest(thread: Any) -> Any:
    """The innermost of our wrappers around the real store (`InstrumentedStore`)."""
    wrapper = thread.store
    while hasattr(wrapper._store, "_store"):
        wrapper = wrapper._store
    return wrapper
