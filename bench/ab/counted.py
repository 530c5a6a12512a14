"""Both connectors with the CPU time of the scheduler's thread counted (`connector_patch.lab.cpu`).

The classes are those of `limited.py`, wrapped. vLLM takes them from here before the scheduler runs. The
counts are in a file that the engine's process has mapped, so that reading them disturbs nobody.
"""

from __future__ import annotations

import functools
import mmap
import os
from pathlib import Path

from bench.ab import limited
from connector_patch.lab import cpu
from singleflight.stack import arms

VARIABLE = "KVSF_BENCH_CPU"
"""The file."""
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
    return connector


def __getattr__(name: str) -> type:
    """The two classes, made when vLLM asks for them."""
    if name not in (arms.STOCK, arms.OURS):
        raise AttributeError(name)
    return _counting(name)
