"""Fixtures of the fault suite."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from connector_patch.config import OnDeadline
from singleflight.core.broken import BrokenKeys
from singleflight.stack.embedded import spawned, tail
from tests.faults.checksums import Guard, guard
from tests.support import blocks, store_prefixes

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.embedded import Stack


@pytest.fixture(scope="session")
def stock(stack: Stack) -> dict[str, Any]:
    """What the stock connector does in the same situations (tests.faults.stock)."""
    out, log = stack.folder / "stock.json", stack.folder / "stock.log"
    argv = [sys.executable, "-m", "tests.faults.stock", str(stack.model), str(out)]
    env = stack.env(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_MOONCAKE_LOAD_RECV_THREADS="4",
        VLLM_LOGGING_LEVEL="ERROR",
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    with spawned(argv, env=env, log=log) as process:
        assert process.wait(240) == 0, tail(log)
    answer: dict[str, Any] = json.loads(out.read_text())
    return answer


@pytest.fixture
def trunk(engine: Engine, salt: int) -> list[int]:
    """Four blocks that are in the store and nowhere else."""
    four = blocks(1, 2, 3, 4, salt=salt)
    store_prefixes(engine, four)
    return four


@pytest.fixture
def configured(engine: Engine) -> Iterator[Callable[..., None]]:
    """Change `on_deadline` and fields of the policy on the shared engine, for one test."""
    attach = engine.connector.layer
    policy, on_deadline = attach.table.policy, attach._on_deadline

    def configure(on_deadline: str | None = None, **fields: float) -> None:
        if on_deadline is not None:
            attach._on_deadline = OnDeadline(on_deadline)
        attach.table.policy = replace(attach.table.policy, **fields)

    yield configure
    attach.table.policy, attach._on_deadline = policy, on_deadline
    attach.table._slowest_s = 0.0  # what it may have learned from a clock that is no clock


@pytest.fixture
def forgetful(engine: Engine) -> None:
    """Keys that could not be read are not remembered."""
    engine.connector.layer.health.broken = BrokenKeys(0.0)


@pytest.fixture
def guarded(engine: Engine) -> Iterator[Guard]:
    """What the prefix cache shows at the end of each test is what the store holds (hazard F5)."""
    with guard(engine) as watching:
        yield watching
