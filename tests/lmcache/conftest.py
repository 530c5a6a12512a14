"""One real LMCache server, one engine with LMCache's connector alone, and one in this process with it in
ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm
    from singleflight.stack.lmcache_server import LMCacheStack

HEARTBEAT_S = 5
"""LMCache asks its server so often whether it lives; a loaded machine answers in time."""
GPU_BLOCKS = 1024


@pytest.fixture(scope="session")
def lmcache() -> Iterator[LMCacheStack]:
    from singleflight.stack.lmcache_server import LMCacheStack

    with LMCacheStack() as running:
        yield running


def of_its_size(transfer: dict[str, Any]) -> dict[str, Any]:
    """An engine with room for all that these tests load."""
    return {"kv_transfer": transfer, "num_gpu_blocks_override": GPU_BLOCKS}


@pytest.fixture(scope="session")
def alone(lmcache: LMCacheStack) -> Iterator[Arm]:
    """LMCache's connector as it comes, in a process of its own."""
    from singleflight.stack.arms import arm

    transfer = lmcache.alone(heartbeat_interval=HEARTBEAT_S)
    name, extra = transfer.pop("kv_connector"), transfer.pop("kv_connector_extra_config")
    with arm(lmcache, name, extra, engine=of_its_size(transfer)) as started:
        started.answer()
        yield started


@pytest.fixture(scope="session")
def ours(lmcache: LMCacheStack) -> Iterator[Engine]:
    """The same connector in ours, attach mode, in this very process: a test says when a step runs."""
    os.environ.update(lmcache.env(VLLM_ENABLE_V1_MULTIPROCESSING="0"))
    from connector_patch.lab.engine import Engine

    transfer = lmcache.wrapped(heartbeat_interval=HEARTBEAT_S)
    name, extra = transfer.pop("kv_connector"), transfer.pop("kv_connector_extra_config")
    engine = Engine(str(lmcache.model), name, extra, **of_its_size(transfer))
    assert engine.connector.passes_through is None
    yield engine
    engine.close()


@pytest.fixture
def engine(ours: Engine) -> Iterator[Engine]:
    """The shared engine; cold before, quiescent after."""
    from tests.lmcache.quiescence import quiescent

    with quiescent(ours) as running:
        yield running
