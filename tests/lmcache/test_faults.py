"""What can happen to a load from LMCache: followers finish with vLLM's own tokens, and no block is lost.

The `engine` fixture checks after each test that nothing is left, and that every block is free again. The
server is a real process; it is killed and stopped by signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from singleflight.core.flight import State
from singleflight.core.stats import Reason
from tests.faults.cohort import Cohort, tailed
from tests.lmcache.quiescence import healthy, in_the_server_only
from tests.lmcache.scripted import failing
from tests.support import BLOCK, STUCK_S, Clock, blocks

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.lmcache_server import LMCacheStack

pytestmark = pytest.mark.engine
NAMES = ("leader", "f0", "f1", "f2")


@pytest.fixture
def trunk(salt: int) -> list[int]:
    """Ten blocks, five of LMCache's chunks."""
    return blocks(*range(1, 11), salt=salt)


@pytest.fixture
def computed(engine: Engine, trunk: list[int]) -> dict[str, list[int]]:
    """Trunk and tails are in the server only; what vLLM makes of them."""
    return in_the_server_only(engine, tailed(trunk, *NAMES))


@pytest.fixture
def in_the_air(cohort: Cohort, engine: Engine, computed: object, trunk: list[int]) -> Cohort:
    """One load of the trunk, held before it is sent; its leader, and three followers."""
    engine.gate.open.clear()
    cohort.arrive(**tailed(trunk, *NAMES))
    assert engine.recorder.counts.gets == 1
    return cohort


@contextlib.contextmanager
def stopped(lmcache: LMCacheStack) -> Iterator[None]:
    """The server stands still: whatever is sent to it waits."""
    pid = lmcache.server.pid
    os.kill(pid, signal.SIGSTOP)
    limit = time.monotonic() + STUCK_S
    while any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in _tasks(pid)):
        assert time.monotonic() < limit, "the server does not stop"
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/stat"))


def expect(cohort: Cohort, computed: dict[str, list[int]], *gone: str) -> None:
    assert cohort.tokens == {name: tokens for name, tokens in computed.items() if name not in gone}


def test_the_leader_is_aborted(
    in_the_air: Cohort, engine: Engine, computed: dict[str, list[int]], trunk: list[int]
) -> None:
    """Its client disconnects; the load goes on for the followers and lands. Who comes then has a local
    hit."""
    cohort = in_the_air
    destination = {block.block_id for block in cohort.flight("leader").destination}
    cohort.abort("leader")
    cohort.step(2)
    assert cohort.flight("leader").state is State.ORPHANED
    assert all(destination <= cohort.blocks(name) for name in NAMES[1:])
    engine.gate.open.set()
    cohort.finish()
    cohort.add(after=[*trunk, 5])
    cohort.finish()
    assert len(cohort.tokens.pop("after")) == 4
    assert engine.recorder.take().gets == 1
    assert cohort.fell_back() == {}
    expect(cohort, computed, "leader")


@pytest.mark.parametrize("who", [("f1",), NAMES], ids=["a follower", "everybody"])
def test_clients_disconnect(
    in_the_air: Cohort, engine: Engine, computed: dict[str, list[int]], who: tuple[str, ...]
) -> None:
    """The rest notices nothing; where nobody is left, the load ends and its blocks are free again."""
    cohort = in_the_air
    cohort.abort(*who)
    cohort.step(2)
    engine.gate.open.set()
    cohort.finish()
    assert engine.recorder.take().gets == 1
    expect(cohort, computed, *who)


def test_the_leaders_load_fails(
    cohort: Cohort, engine: Engine, computed: dict[str, list[int]], trunk: list[int], policy: str
) -> None:
    """LMCache names all blocks of the load. Under "fail" vLLM ends the leader with an error; its followers
    fall back, and come again. Nobody computes with what the load has left behind; at most one more load is
    made."""
    engine.gate.open.clear()
    with failing(engine, lambda request_id: request_id.startswith("leader")):
        cohort.arrive(**tailed(trunk, *NAMES))
        engine.gate.open.set()
        cohort.finish()
    assert engine.recorder.take().gets <= 2
    assert cohort.fell_back() == {Reason.LEADER_FAILED: 3}
    if policy == "fail":
        assert cohort.tokens["leader"] == [], "the leader meets vLLM's policy"
        del cohort.tokens["leader"]
        expect(cohort, computed, "leader")
    else:
        expect(cohort, computed)


def test_a_followers_own_load_fails_within_a_chunk_that_it_shares(
    cohort: Cohort, engine: Engine, salt: int, policy: str
) -> None:
    """Leader and follower share three blocks, one and a half chunks. The follower's own load begins with
    the second half of its second chunk, and fails; LMCache names the first half too, which is the leader's
    block, and good. The leader's answer is right, whatever is done about that block."""
    trunk = blocks(1, 2, 3, salt=salt)
    prompts = {
        name: [*trunk, *blocks(*range(start, start + 5), salt=salt), 7]
        for name, start in (("leader", 30), ("follower", 40))
    }
    computed = in_the_server_only(engine, prompts)
    engine.gate.open.clear()
    with failing(engine, lambda request_id: request_id.startswith("follower")):
        cohort.arrive(**prompts)
        engine.gate.concerns = lambda keys: keys[0].startswith("leader")
        cohort.until(lambda: not any(k.startswith("follower") for k in _retrieving(engine)))
        cohort.step(3)
        engine.gate.open.set()
        cohort.finish()
    if policy == "fail":
        assert cohort.tokens.pop("follower") == []
        expect(cohort, computed, "follower")
    else:
        expect(cohort, computed)


def _retrieving(engine: Engine) -> list[str]:
    from connector_patch.lab.lmcache_bed import lmcache_of

    worker = lmcache_of(engine.worker_connector)
    assert worker is not None
    return list(worker.worker_adapter.retrieve_futures)


@pytest.mark.parametrize("policy", ["recompute"], indirect=True)
def test_the_server_is_killed_while_it_loads(
    in_the_air: Cohort, engine: Engine, lmcache: LMCacheStack, computed: dict[str, list[int]], policy: str
) -> None:
    """It has the request and does not answer it any more. LMCache finds out by its heartbeat, and reports
    the load as failed; leader and followers compute. A new server comes, LMCache registers again, and loads
    are shared again."""
    cohort = in_the_air
    with stopped(lmcache):
        engine.gate.open.set()
        cohort.step(3)
        assert _retrieving(engine), "the server has not been asked"
        os.kill(lmcache.server.pid, signal.SIGKILL)
    cohort.finish()
    assert cohort.fell_back() == {Reason.LEADER_FAILED: 3}
    expect(cohort, computed)
    lmcache.stop()
    lmcache.start()
    cohort.until(lambda: healthy(engine))
    prompts = tailed(blocks(*range(21, 31), salt=1), "a", "b")
    again = in_the_server_only(engine, prompts)
    engine.gate.open.clear()
    cohort.arrive(**prompts)
    engine.gate.open.set()
    cohort.finish()
    assert engine.recorder.take().gets == 1
    assert {name: cohort.tokens[name] for name in prompts} == again


def test_the_server_hangs_until_the_deadline(
    in_the_air: Cohort, engine: Engine, lmcache: LMCacheStack, computed: dict[str, list[int]], clock: Clock
) -> None:
    """It stands still with the request in hand. When the deadline passes, followers compute at once, while
    the leader's load is still in the air; it goes on when the server does."""
    cohort = in_the_air
    with stopped(lmcache):
        engine.gate.open.set()
        cohort.step(3)
        clock.advance(1000.0)
        cohort.finish(*NAMES[1:])
        assert cohort.fell_back() == {Reason.DEADLINE: 3}
    cohort.finish()
    expect(cohort, computed)


def test_both_caches_are_reset_while_it_loads(
    in_the_air: Cohort, engine: Engine, computed: dict[str, list[int]]
) -> None:
    """vLLM says False, since blocks are in use. Followers leave with reason reset, and what the load brings
    is thrown away. LMCache's server keeps what is locked for a load, so whoever comes again may load it
    once more, in a flight of its own."""
    cohort = in_the_air
    engine.scheduler.recompute_kv_load_failures = True
    try:
        assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
        assert not len(cohort.table)
        assert cohort.fell_back() == {Reason.RESET: 3}
        cohort.step(3)
        assert cohort.flight("leader").state is State.DISCARDED
        engine.gate.open.set()
        cohort.finish()
    finally:
        engine.scheduler.recompute_kv_load_failures = False
    expect(cohort, computed)


def test_a_pool_that_has_no_room_for_a_copy_each(
    cohort: Cohort, engine: Engine, computed: dict[str, list[int]], trunk: list[int]
) -> None:
    """Fifteen blocks are free: room for one load of ten, and not for a second. All four run on the one."""
    with cohort.free(15):
        engine.gate.open.clear()
        cohort.arrive(**tailed(trunk, *NAMES))
        engine.gate.open.set()
        cohort.finish()
    assert engine.recorder.take().gets == 1
    expect(cohort, computed)


def test_a_pool_in_which_prefixes_follow_each_other(cohort: Cohort, engine: Engine, salt: int) -> None:
    """Room for one prefix and a half; twelve requests for three prefixes arrive together. All finish; each
    prefix is loaded at most once a request, as in LMCache alone, and at least once."""
    prompts = {
        f"p{p}r{i}": [*blocks(*range(20 * p, 20 * p + 10), salt=salt), 5 + i]
        for p in range(3)
        for i in range(4)
    }
    computed = in_the_server_only(engine, prompts)
    with cohort.free(16):
        cohort.add(**prompts)
        cohort.finish()
    assert 3 <= engine.recorder.take().gets <= 12
    assert cohort.tokens == computed
    assert len(prompts["p0r0"]) > 10 * BLOCK
