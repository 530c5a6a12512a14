"""One real stack for the whole run; one engine per connector and process, shared by all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from connector_patch.engine import Engine
    from singleflight.arms import Arm
    from singleflight.embedded import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """A real mooncake_master and store node."""
    from singleflight.embedded import Stack

    with Stack() as running:
        yield running


@pytest.fixture(scope="session")
def ours(stack: Stack) -> Iterator[Engine]:
    """Our connector in attach mode in this very process, four receive threads, found by module path.

    Four threads, so that a held Get does not hold those that need not wait for it. The environment must
    be complete before vLLM is imported, hence no test imports vllm at module level.
    """
    os.environ.update(stack.env(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_MOONCAKE_LOAD_RECV_THREADS="4"))
    from connector_patch.engine import Engine
    from connector_patch.plugin import NAME

    if "llvmlite" in sys.modules:
        pytest.fail("vLLM's CPU engine does not start where numba is loaded; run tests/sim apart (make test)")
    engine = Engine(
        str(stack.model), NAME, kv_transfer={"kv_connector_module_path": "connector_patch.connector"}
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def reference(stack: Stack) -> Iterator[Arm]:
    """vLLM without any connector, in a process of its own: what the tokens ought to be."""
    from singleflight.arms import arm

    with arm(stack, "none") as plain:
        plain.answer()
        yield plain
