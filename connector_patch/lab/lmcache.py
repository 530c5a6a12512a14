"""LMCache's connector where vLLM is the CPU wheel; `kv_connector_module_path` names this module.

LMCache imports numba. While the CPU wheel puts its own kernels in Triton's place, it looks into every
module that is loaded, and llvmlite's do not bear that. So that one look does not see them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from vllm.triton_utils import dispatcher

HIDDEN = ("llvmlite", "numba")
MODULE = __name__


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Without these packages in `sys.modules`."""
    away = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in HIDDEN}
    for name in away:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(away)


def _look_past_numba(rebind: Any) -> Any:
    def looking(overrides: Any) -> None:
        with hidden():
            rebind(overrides)

    looking.__wrapped__ = rebind  # type: ignore[attr-defined]
    return looking


if not hasattr(dispatcher._rebind_kernels, "__wrapped__"):
    dispatcher._rebind_kernels = _look_past_numba(dispatcher._rebind_kernels)

# After the patch: this import brings numba.
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import (  # noqa: E402
    LMCacheMPConnector as LMCacheMPConnector,
)
