"""One real stack for the whole run; one engine per connector and process, shared by all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm
    from singleflight.stack.embedded import Stack
    from tests.faults.cohort import Cohort
    from tests.support import Clock


# The same examples in every run: what fails once fails again. `--hypothesis-profile=default` makes new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Tests press Ctrl-C, here and in child processes. A script's background job starts with it ignored.

    Engines compute on one thread, wherever there is room. By default vLLM binds a thread to each core, and
    these spin: the engines of two suites, or of one test, then take the cores from each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """A real mooncake_master and store node."""
    from singleflight.stack.embedded import Stack

    with Stack() as running:
        yield running


@pytest.fixture(scope="session")
def ours(stack: Stack) -> Iterator[Engine]:
    """Our connector in attach mode in this very process, four receive threads, found by module path.

    Four threads, so that a held Get does not hold those that need not wait for it. The environment must
    be complete before vLLM is imported, hence no test imports vllm at module level.
    """
    os.environ.update(stack.env(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_MOONCAKE_LOAD_RECV_THREADS="4"))
    from connector_patch.lab.engine import Engine
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
    from singleflight.stack.arms import arm

    with arm(stack, "none") as plain:
        plain.answer()
        yield plain


@pytest.fixture
def salt() -> int:
    """Tells this test's prompts from every other test's."""
    from tests.support import salts

    return next(salts)


@pytest.fixture
def engine(ours: Engine) -> Iterator[Engine]:
    """The shared engine; cold before, quiescent after (`tests.support.quiescent`)."""
    from tests.support import quiescent

    with quiescent(ours) as running:
        yield running


@pytest.fixture
def cohort(engine: Engine) -> Cohort:
    """Requests on the shared engine, driven step by step."""
    from tests.faults.cohort import Cohort

    return Cohort(engine)


@pytest.fixture
def clock(engine: Engine) -> Clock:
    """The adapter's clock, standing still until the test moves it."""
    moved: Clock = engine.connector.layer._clock
    return moved


@pytest.fixture(params=["fail", "recompute"])
def policy(request: pytest.FixtureRequest, engine: Engine) -> Iterator[str]:
    """Both values of kv_load_failure_policy, which the scheduler keeps as one flag."""
    before = engine.scheduler.recompute_kv_load_failures
    engine.scheduler.recompute_kv_load_failures = request.param == "recompute"
    yield request.param
    engine.scheduler.recompute_kv_load_failures = before
