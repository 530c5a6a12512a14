"""LMCache's connector behind an in-process limiter: a link that its loads share by taking turns.

In all arms alike. LMCache's server writes into the engine's memory by itself, so there is no wire to shape.
The rate is in the environment.
"""

from __future__ import annotations

import os
from typing import Any

NAME = "LMCacheMPConnector"
MODULE = "bench.ab.lmcache_limited"
"""Give it as `kv_connector_module_path`."""
VARIABLE = "KVSF_BENCH_BYTES_PER_S"


def __getattr__(name: str) -> type:
    """The class, made when vLLM asks for it: LMCache is imported by engines only."""
    if name != NAME:
        raise AttributeError(name)
    from connector_patch.lab import lmcache, lmcache_bed
    from connector_patch.lab.instrument import Gate

    class LMCacheMPConnector(lmcache.LMCacheMPConnector):  # type: ignore[misc, valid-type]
        def register_kv_caches(self, *arguments: Any, **named: Any) -> None:
            super().register_kv_caches(*arguments, **named)
            gate = Gate()
            gate.bytes_per_s = float(os.environ[VARIABLE])
            lmcache_bed.slow(self, gate)

    return LMCacheMPConnector
