"""The other modes over LMCache: park and shadow on the engine that attach mode's tests use, the rest on their
own."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from connector_patch.config import Config
from singleflight.stack.arms import arm
from tests.faults.cohort import Cohort, tailed
from tests.lmcache.conftest import HEARTBEAT_S, of_its_size
from tests.lmcache.quiescence import in_the_server_only
from tests.support import blocks, salts
from tests.verdicts import yes

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.lmcache_server import LMCacheStack

pytestmark = pytest.mark.engine
NAMES = ("r0", "r1", "r2", "r3")


@pytest.fixture
def parked(engine: Engine) -> Iterator[Engine]:
    from connector_patch.park import ParkScheduler

    connector, attach = engine.connector, engine.connector.layer
    connector.layer = ParkScheduler(connector._store, Config())
    yield engine
    engine.gate.open.set()
    engine.settle()
    assert not len(connector.layer.table)
    connector.layer = attach


@pytest.fixture
def watched(engine: Engine) -> Iterator[Engine]:
    from connector_patch.shadow import Shadow

    connector, attach = engine.connector, engine.connector.layer
    connector.layer, connector.shadow = None, Shadow(connector._store, 1000)
    yield engine
    engine.gate.open.set()
    engine.settle()
    connector.layer, connector.shadow = attach, None


def test_park_mode_loads_once(parked: Engine, salt: int) -> None:
    """Whoever comes while the load is held waits without a block, and runs on what it brings."""
    prompts = tailed(blocks(*range(1, 11), salt=salt), *NAMES)
    computed = in_the_server_only(parked, prompts)
    cohort = Cohort(parked)
    parked.gate.open.clear()
    cohort.arrive(r0=prompts["r0"])
    free = parked.free_blocks()
    cohort.add(**{name: prompts[name] for name in NAMES[1:]})
    cohort.step(20)
    assert parked.free_blocks() == free
    parked.gate.open.set()
    cohort.finish()
    assert parked.recorder.take().gets == 1
    assert cohort.tokens == computed


def test_shadow_mode_changes_nothing_and_counts_what_would_have_been_shared(
    watched: Engine, salt: int
) -> None:
    """LMCache alone: a load each. Shadow mode has seen three followers' blocks that were being loaded
    already."""
    prompts = tailed(blocks(*range(1, 11), salt=salt), *NAMES)
    computed = in_the_server_only(watched, prompts)
    stats = watched.connector.shadow.stats
    assert watched.burst(prompts, barrier=True).tokens == computed
    assert watched.recorder.take().gets == 4
    assert (stats.loads, stats.removable) == (4, 3 * 10)


@pytest.mark.parametrize(
    ("asked", "verdict", "mode", "gets"),
    [("off", False, "off", 4), ("auto", False, "shadow", 4), ("auto", True, "attach", 1)],
)
def test_off_is_lmcache_alone_and_auto_does_what_a_verdict_says(
    lmcache: LMCacheStack, tmp_path: Path, asked: str, verdict: bool, mode: str, gets: int
) -> None:
    """And each records who came, as around Mooncake."""
    gate, trace = tmp_path / "verdict.json", tmp_path / "trace.jsonl"
    settings = {"mode": asked, "record": {"path": str(trace)}}
    if verdict:
        yes(datetime.datetime.now(datetime.UTC).isoformat(), str(lmcache.model)).write(gate)
        settings["gate"] = str(gate)
    transfer = lmcache.wrapped(settings, heartbeat_interval=HEARTBEAT_S)
    name, extra = transfer.pop("kv_connector"), transfer.pop("kv_connector_extra_config")
    prompts = tailed(blocks(*range(1, 11), salt=next(salts)), *NAMES)
    with arm(lmcache, name, extra, engine=of_its_size(transfer)) as engine:
        engine.answer()
        assert engine.ask("mode")["mode"] == mode
        computed = engine.ask("burst", prompts=prompts)["tokens"]
        engine.ask("fill", prompts=list(prompts.values()))
        burst = engine.ask("burst", prompts=prompts, barrier=True)
        engine.ask("cold")
    assert burst["tokens"] == computed
    assert burst["counts"]["gets"] == gets
    assert len(trace.read_text().splitlines()) >= 2 * len(NAMES)
