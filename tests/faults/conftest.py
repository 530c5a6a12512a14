"""Fixtures of the fault suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.faults.checksums import Guard, guard
from tests.support import quiescent, salts

if TYPE_CHECKING:
    from connector_patch.engine import Engine


@pytest.fixture
def salt() -> int:
    return next(salts)


@pytest.fixture
def engine(ours: Engine) -> Iterator[Engine]:
    """The shared engine; cold before, quiescent after (tests.support.quiescent)."""
    with quiescent(ours) as running:
        yield running


@pytest.fixture(params=["fail", "recompute"])
def policy(request: pytest.FixtureRequest, engine: Engine) -> Iterator[str]:
    """Both values of kv_load_failure_policy, which the scheduler keeps as one flag."""
    before = engine.scheduler.recompute_kv_load_failures
    engine.scheduler.recompute_kv_load_failures = request.param == "recompute"
    yield request.param
    engine.scheduler.recompute_kv_load_failures = before


@pytest.fixture
def guarded(engine: Engine) -> Iterator[Guard]:
    """What the prefix cache shows at the end of each test is what the store holds (hazard F5)."""
    with guard(engine) as watching:
        yield watching
