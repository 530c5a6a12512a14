"""How long a store's Gets take: a latency, a bandwidth, and what parallel receive threads bring.

The real client, and the call that vLLM's receive threads make. Its probe keys are its own, and are removed.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 256 << 10
"""Bytes a probe key: 2 KiB of KV a token times 128 tokens, or a small model's block."""
RUNS = (1, 4, 16, 64)
"""Keys a Get: up to 16 MiB."""
REPEATS = 15


class StoreError(RuntimeError):
    """The store cannot be measured; one sentence."""


@dataclass(frozen=True)
class Measured:
    """Of Gets of `RUNS` keys.

    Attributes:
        seconds: keys a Get -> its median time, s.
        latency_s, bytes_per_s: the line through them.
        threads, parallel: receive threads, and how many times more bytes a second they bring than one.
    """

    seconds: dict[int, float]
    latency_s: float
    bytes_per_s: float
    threads: int
    parallel: float

    def figures(self) -> dict[str, float]:
        return {
            "load_latency": self.latency_s,
            "load_bandwidth": self.bytes_per_s,
            "parallel_loads": self.parallel,
        }

    def note(self) -> str:
        medians = ", ".join(f"{keys} in {1000 * s:.2f} ms" for keys, s in self.seconds.items())
        return (
            f"Store: Gets of keys of {BLOCK_BYTES >> 10} KiB, medians of {REPEATS}: {medians};"
            f" {self.threads} receive threads."
        )


def measure(config: Path, threads: int) -> Measured:
    """Measure the store that a Mooncake JSON names.

    Raises:
        StoreError: it cannot be reached, or does not take or give the probe keys.
    """
    with _client(config) as store, _probe(store, threads) as get:
        for keys in RUNS:
            get(0, keys)  # connections are made, buffers touched
        seconds = {}
        for keys in RUNS:
            seconds[keys] = statistics.median(_timed(lambda n=keys: get(0, n)) for _ in range(REPEATS))
        latency, bandwidth = line({keys * BLOCK_BYTES: took for keys, took in seconds.items()})
        parallel = 1.0
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:

                def together() -> None:
                    list(pool.map(lambda thread: get(thread, RUNS[-1]), range(threads)))

                together()
                took = statistics.median(_timed(together) for _ in range(REPEATS))
            parallel = min(max(threads * seconds[RUNS[-1]] / took, 1.0), float(threads))
    return Measured(seconds, latency, bandwidth, threads, parallel)


def line(seconds: dict[int, float]) -> tuple[float, float]:
    """Latency, s, and bandwidth, bytes/s: least squares of relative errors over bytes -> seconds.

    Where noise makes the line nonsense: the smallest Get's time, and the largest one's bytes a second.
    """
    size, took = np.array(list(seconds)), np.array(list(seconds.values()))
    slope, latency = np.polyfit(size, took, 1, w=1 / took)
    if slope <= 0:
        return float(took[0]), float(size[-1] / took[-1])
    return max(0.0, float(latency)), float(1 / slope)


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def _client(config: Path) -> Iterator[Any]:
    from mooncake.store import MooncakeDistributedStore
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import rdma_utils
    from vllm.distributed.mooncake_store import MooncakeStoreConfig, setup_mooncake_store
    from vllm.utils.network_utils import get_ip

    try:
        settings = MooncakeStoreConfig.from_file(str(config))
    except (OSError, ValueError, TypeError) as fault:
        raise StoreError(f"{config}: {fault}; give the JSON that MOONCAKE_CONFIG_PATH names") from None
    settings.global_segment_size = 0  # a guest: it brings no memory for others' objects
    store = MooncakeDistributedStore()
    try:
        setup_mooncake_store(store, settings, rdma_utils.get_requester_local_hostname(get_ip()))
    except RuntimeError:
        raise StoreError(
            f"no Mooncake master answers at {settings.master_server_address}, which {config} names"
        ) from None
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _probe(store: Any, threads: int) -> Iterator[Any]:
    """Put the probe keys; yields get(thread, n): load the first n of them to that thread's own buffer."""
    buffers = [np.ones(RUNS[-1] * BLOCK_BYTES, np.uint8) for _ in range(threads)]
    keys = [f"kv-singleflight/calibrate/{uuid.uuid4().hex}/{i}" for i in range(RUNS[-1])]
    for buffer in buffers:
        if code := store.register_buffer(buffer.ctypes.data, buffer.nbytes):
            raise StoreError(f"the store's client does not register a buffer: Mooncake's code {code}")

    def get(thread: int, n: int) -> None:
        start = buffers[thread].ctypes.data
        places = [[start + i * BLOCK_BYTES] for i in range(n)]
        answers = store.batch_get_into_multi_buffers(keys[:n], places, [[BLOCK_BYTES]] * n)
        if any(answer != BLOCK_BYTES for answer in answers):
            raise StoreError(f"a Get of {n} probe keys failed: Mooncake's code {min(answers)}")

    try:
        for key in keys:
            if code := store.put_from(key, buffers[0].ctypes.data, BLOCK_BYTES):
                raise StoreError(f"the store does not take the probe keys: Mooncake's code {code}")
        yield get
    finally:
        for key in keys:
            store.remove(key, True)  # by force: what was just read has a lease
        for buffer in buffers:
            store.unregister_buffer(buffer.ctypes.data)
