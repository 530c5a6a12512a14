"""How long a store's Gets take: a latency, a bandwidth, and what parallel receive threads bring.

The real client, and the call that vLLM's receive threads make. Its probe keys are its own, and are removed.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from singleflight.files import shown
from singleflight.stack import mooncake_json

from .calibrate_tiers import StoreError, Tier, tiers_of, to_ssd

BLOCK_BYTES = 256 << 10
"""Bytes a probe key: 2 KiB of KV a token times 128 tokens, or a small model's block."""
RUNS = (1, 4, 16, 64)
"""Keys a Get: up to 16 MiB."""
REPEATS = 15


NOTES = {
    Tier.MEMORY: "They say nothing about loads from an SSD tier (--tier ssd).",
    Tier.SSD: "What was just written may have come from the page cache of the node that has the disk, so a"
    " disk under load is slower.",
}
NO_SPACE = -200
"""Mooncake's NO_AVAILABLE_HANDLE."""


@dataclass(frozen=True)
class Measured:
    """Of Gets of `RUNS` keys.

    Attributes:
        seconds: keys a Get -> its median time, s.
        latency_s, bytes_per_s: the line through them.
        threads, parallel: receive threads, and how many times more bytes a second they bring than one.
        tier: where the store had the keys.
    """

    seconds: dict[int, float]
    latency_s: float
    bytes_per_s: float
    threads: int
    parallel: float
    tier: Tier

    def figures(self) -> dict[str, float]:
        return {
            "load_latency": self.latency_s,
            "load_bandwidth": self.bytes_per_s,
            "parallel_loads": self.parallel,
        }

    def note(self) -> str:
        medians = ", ".join(f"{keys} in {1000 * s:.2f} ms" for keys, s in self.seconds.items())
        return (
            f"Store, {self.tier.value}: Gets of keys of {BLOCK_BYTES >> 10} KiB, medians of {REPEATS}:"
            f" {medians}; {self.threads} receive threads. {NOTES[self.tier]}"
        )


def measure(config: Path, threads: int, tier: str, say: Callable[[str], None]) -> Measured:
    """Measure the store that a Mooncake JSON names.

    Args:
        tier: where it is to have the keys, a value of `Tier`.
        say: told what is done now.

    Raises:
        StoreError: it cannot be reached, or does not take or give the probe keys, or has them elsewhere.
    """
    say("measuring the store: its client starts")
    with _client(config) as store, _probe(store, threads, Tier(tier), say) as get:
        say("measuring the store: Gets")
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
    return Measured(seconds, latency, bandwidth, threads, parallel, Tier(tier))


def refusal(code: int) -> str:
    """Why a put failed, in a sentence."""
    if code == NO_SPACE:
        return (
            f"the store has no room for the probe keys (Mooncake's code {code}): nobody offers memory, or all"
            " is taken; start the server or a store node first"
        )
    return f"the store does not take the probe keys: Mooncake's code {code}"


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


def settings_of(config: Path) -> Any:
    """What vLLM makes of the file. StoreError: it makes nothing of it."""
    from vllm.distributed.mooncake_store import MooncakeStoreConfig

    try:
        mooncake_json.read(config)
        return MooncakeStoreConfig.from_file(str(config))
    except mooncake_json.MooncakeJsonError as fault:
        raise StoreError(str(fault)) from None
    except Exception as fault:  # of vLLM's own reading, whatever it trips over
        raise StoreError(f"{shown.path(config)}: {shown.text(fault, 200)}; {mooncake_json.GIVE}") from None


@contextlib.contextmanager
def _client(config: Path) -> Iterator[Any]:
    from mooncake.store import MooncakeDistributedStore
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import rdma_utils
    from vllm.distributed.mooncake_store import setup_mooncake_store
    from vllm.utils.network_utils import get_ip

    settings = settings_of(config)
    settings.global_segment_size = 0  # a guest: it brings no memory for others' objects
    store = MooncakeDistributedStore()
    try:
        setup_mooncake_store(store, settings, rdma_utils.get_requester_local_hostname(get_ip()))
    except (RuntimeError, TypeError, OverflowError) as fault:
        # Not that nobody is there: the master's port has answered.
        raise StoreError(
            f"Mooncake's client does not start with {shown.path(config)}: {shown.text(fault, 200)}"
        ) from None
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _probe(store: Any, threads: int, tier: Tier, say: Callable[[str], None]) -> Iterator[Any]:
    """Put the probe keys, have them in the tier; yields get(thread, n): load the first n of them to that
    thread's own buffer."""
    buffers = [np.ones(RUNS[-1] * BLOCK_BYTES, np.uint8) for _ in range(threads)]
    prefix = f"kv-singleflight/calibrate/{uuid.uuid4().hex}"
    keys: list[str] = []
    for buffer in buffers:
        if code := store.register_buffer(buffer.ctypes.data, buffer.nbytes):
            raise StoreError(f"the store's client does not register a buffer: Mooncake's code {code}")

    def put(n: int) -> list[str]:
        new = [f"{prefix}/{len(keys) + i}" for i in range(n)]
        keys.extend(new)
        for key in new:
            if code := store.put_from(key, buffers[0].ctypes.data, BLOCK_BYTES):
                raise StoreError(refusal(code))
        return new

    def get(thread: int, n: int) -> None:
        start = buffers[thread].ctypes.data
        places = [[start + i * BLOCK_BYTES] for i in range(n)]
        answers = store.batch_get_into_multi_buffers(probe[:n], places, [[BLOCK_BYTES]] * n)
        if any(answer != BLOCK_BYTES for answer in answers):
            raise StoreError(f"a Get of {n} probe keys failed: Mooncake's code {min(answers)}")

    try:
        probe = to_ssd(store, put, RUNS[-1], say) if tier is Tier.SSD else put(RUNS[-1])
        yield get
        if {*tiers_of(store, probe).values()} - {tier, None}:
            raise StoreError(
                f"the probe keys did not stay in the {tier.value} tier while they were loaded, so this"
                " measured something else; try again, and for ssd without the master's --promotion_on_hit"
            )
    finally:
        for key in keys:
            store.remove(key, True)  # by force: what was just read has a lease
        for buffer in buffers:
            store.unregister_buffer(buffer.ctypes.data)
