"""Both connectors with the CPU time of the scheduler's thread counted (`connector_patch.lab.cpu`), and with
receive threads that give way to the model where both are on one core.

A receive thread of Mooncake's spins while bytes come in. vLLM has it on the model's core here, where a
prefill takes twice as long meanwhile: link and accelerator are not two machines then, as with a GPU. On
another core Gets stalled for seconds now and then (why is not known), so it is niced instead.

The classes are those of `limited.py`, wrapped. vLLM takes them from here before the scheduler runs. The
counts are in a file that the engine's process has mapped, so that reading them disturbs nobody.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
from pathlib import Path

from bench.ab import limited
from connector_patch.lab import cpu
from singleflight.stack import arms

VARIABLE = "KVSF_BENCH_CPU"
"""The file."""
NICE = "KVSF_BENCH_LOAD_NICE"
"""Of receive threads."""
MODULE = "bench.ab.counted"
SIZE = 8 * len(cpu.COUNTS)


def read(path: Path) -> dict[str, int]:
    """The counts as they stand; 0 where no engine has begun."""
    data = path.read_bytes() if path.exists() else b""
    return dict(zip(cpu.COUNTS, memoryview(data or bytes(SIZE)).cast("q"), strict=True))


@functools.cache
def _counting(name: str) -> type:
    from vllm.v1.core.sched.scheduler import Scheduler

    connector: type = getattr(limited, name)
    path = Path(os.environ[VARIABLE])
    path.touch()
    os.truncate(path, SIZE)
    with path.open("r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("q")
    cpu.count(Scheduler, connector, counts)
    _receive_nicely(int(os.environ[NICE]))
    return connector


def _receive_nicely(nice: int) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import KVCacheStoreRecvingThread

    run = KVCacheStoreRecvingThread.run

    def nicely(thread: KVCacheStoreRecvingThread) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        run(thread)

    KVCacheStoreRecvingThread.run = nicely


def __getattr__(name: str) -> type:
    """The two classes, made when vLLM asks for them."""
    if name not in (arms.STOCK, arms.OURS):
        raise AttributeError(name)
    return _counting(name)
