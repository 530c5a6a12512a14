"""Both connectors behind an in-process limiter: for latency, which this kernel's `tc` cannot add, and for
machines where no shaped link can be made.

The limits are read from a file before every Get, so
that one server serves several of them; its folder is in the environment.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from singleflight.stack import arms
from singleflight.stack.demo import replace_file

FILE = "limit.json"
VARIABLE = "KVSF_BENCH_LIMIT"
MODULE = "bench.ab.limited"
"""Give it as `kv_connector_module_path`: vLLM looks a name up there first, so both keep their names."""


def write(folder: Path, gbit_s: float | None, latency_s: float) -> None:
    """Set the limits: a rate that Gets share by taking turns, and a delay that each has for itself."""
    text = json.dumps({"bytes_per_s": gbit_s and gbit_s * 1e9 / 8, "latency_s": latency_s})
    replace_file(folder / FILE, lambda scratch: scratch.write_text(text))


class _LimitedStore:
    """The real store; its Gets wait first. Everything else passes through."""

    turn = threading.Lock()

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(self, keys: list[str], addresses: Any, sizes: list[list[int]]) -> Any:
        limit = json.loads(Path(os.environ[VARIABLE], FILE).read_text())
        time.sleep(limit["latency_s"])
        if limit["bytes_per_s"]:
            with self.turn:
                time.sleep(sum(map(sum, sizes)) / limit["bytes_per_s"])
        return self._store.batch_get_into_multi_buffers(keys, addresses, sizes)


def _limited(base: type) -> type:
    class Limited(base):  # type: ignore[misc]
        def register_kv_caches(self, *arguments: Any, **named: Any) -> None:
            super().register_kv_caches(*arguments, **named)
            for thread in self.connector_worker.kv_recv_threads:
                thread.store = _LimitedStore(thread.store)

    return Limited


def __getattr__(name: str) -> type:
    """The two classes, made when vLLM asks for them: importing their bases is slow, and only engines can."""
    if name == arms.STOCK:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
            MooncakeStoreConnector as Base,
        )
    elif name == arms.OURS:
        from connector_patch.connector import SingleFlightMooncakeStoreConnector as Base
    else:
        raise AttributeError(name)
    return _limited(Base)
