"""What N requests for one cold prefix load from LMCache: N times it alone, once in ours."""

from __future__ import annotations

import time
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.lmcache.quiescence import in_the_server_only
from tests.support import BLOCK, STUCK_S, blocks

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm
    from singleflight.stack.lmcache_server import LMCacheStack
    from tests.faults.cohort import Cohort

pytestmark = pytest.mark.engine
RETRIEVES = "lmcache_mp_num_submitted_retrieves_total"
TRUNK = range(1, 21)
"""640 tokens, ten of LMCache's chunks."""


def retrieves(lmcache: LMCacheStack, at_least: float) -> float:
    """How many retrieves the server has seen. It counts them a little later: so not before there are so
    many."""
    limit = time.monotonic() + STUCK_S
    while True:
        with urllib.request.urlopen(lmcache.metrics_url, timeout=STUCK_S) as answer:
            lines = answer.read().decode().splitlines()
        seen = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(RETRIEVES))
        if seen >= at_least:
            return seen
        assert time.monotonic() < limit, f"the server has seen {seen:.0f} retrieves"
        time.sleep(0.05)


def test_four_requests_for_one_cold_prefix_are_one_load(
    engine: Engine, alone: Arm, lmcache: LMCacheStack, salt: int
) -> None:
    """The barrier holds the first load until all four have been through the scheduler. LMCache alone loads
    the prefix four times into four sets of blocks. In ours there is one load, and a lookup for each
    request: LMCache must hear of each. The tokens are the same, and those that vLLM computes."""
    trunk = blocks(*TRUNK, salt=salt)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(4)}
    computed = in_the_server_only(engine, prompts)
    before = retrieves(lmcache, 0)
    stock = alone.ask("burst", prompts=prompts, barrier=True)
    between = retrieves(lmcache, before + 4)
    burst = engine.burst(prompts, barrier=True)
    counts = engine.recorder.take()
    assert (between - before, retrieves(lmcache, between + 1) - between) == (4, 1), "the server's own count"
    assert stock["counts"]["gets"] == 4
    assert stock["counts"]["gpu_blocks"] == 4 * len(TRUNK)
    assert counts.gets == 1
    assert counts.gpu_blocks == len(TRUNK)
    assert counts.bytes * 4 == stock["counts"]["bytes"]
    assert counts.lookups == stock["counts"]["lookups"] == 4
    assert burst.tokens == stock["tokens"] == computed


def test_each_suffix_of_its_own_is_loaded_once(cohort: Cohort, engine: Engine, salt: int) -> None:
    """Four prompts share ten chunks and go on with a chunk of their own, all stored. The leader loads its
    whole prompt; each follower adopts the ten chunks and loads its one, at once and beside the leader."""
    trunk = blocks(*TRUNK, salt=salt)
    prompts = {f"r{i}": [*trunk, *blocks(30 + 2 * i, 31 + 2 * i, salt=salt), 7] for i in range(4)}
    computed = in_the_server_only(engine, prompts)
    engine.gate.open.clear()
    cohort.arrive(**prompts)
    engine.gate.open.set()
    cohort.finish()
    counts = engine.recorder.take()
    assert counts.gets == 4
    assert counts.gpu_blocks == len(TRUNK) + 4 * 2
    assert cohort.tokens == computed


def test_a_run_that_ends_within_a_chunk(cohort: Cohort, engine: Engine, salt: int) -> None:
    """Two prompts share three blocks of 32 tokens, one and a half chunks; the rest of each is stored too.
    LMCache has two different second chunks. The follower adopts the three blocks, and of its own second
    chunk LMCache writes the second half only: the first is the leader's block."""
    trunk = blocks(1, 2, 3, salt=salt)
    prompts = {f"r{i}": [*trunk, *blocks(*range(30 + 9 * i, 35 + 9 * i), salt=salt), 7] for i in range(2)}
    computed = in_the_server_only(engine, prompts)
    engine.gate.open.clear()
    cohort.arrive(**prompts)
    shared = cohort.blocks("r0") & cohort.blocks("r1")
    engine.gate.open.set()
    cohort.finish()
    counts = engine.recorder.take()
    assert len(shared) == 3
    assert (counts.gets, counts.gpu_blocks) == (2, 8 + 5)
    assert cohort.tokens == computed


def test_a_local_hit_that_ends_within_a_chunk(cohort: Cohort, engine: Engine, salt: int) -> None:
    """One block is in vLLM's own cache, eight are stored: LMCache loads from the chunk's start, and writes
    only what is not there. Leader and followers stand on the same local block."""
    trunk = blocks(*range(1, 9), salt=salt)
    prompts = {f"r{i}": [*trunk, 7 + i] for i in range(3)}
    computed = in_the_server_only(engine, prompts)
    engine.burst({"local": [*trunk[:BLOCK], 5]}, max_tokens=1)
    engine.settle()
    engine.recorder.take()
    engine.gate.open.clear()
    cohort.arrive(**prompts)
    engine.gate.open.set()
    cohort.finish()
    counts = engine.recorder.take()
    assert (counts.gets, counts.gpu_blocks) == (1, 7)
    assert cohort.tokens == computed


def test_prompts_of_whole_chunks(cohort: Cohort, engine: Engine, salt: int) -> None:
    """All of such a prompt is stored, and LMCache says one token less. The last block is computed into, so
    each request has one of its own; the rest is loaded once."""
    trunk = blocks(*range(1, 9), salt=salt)
    prompts = {f"r{i}": trunk for i in range(3)}
    computed = in_the_server_only(engine, prompts)
    engine.gate.open.clear()
    cohort.arrive(**prompts)
    shared = set.intersection(*(cohort.blocks(name) for name in prompts))
    engine.gate.open.set()
    cohort.finish()
    assert len(shared) == 7
    counts = engine.recorder.take()
    assert (counts.gets, counts.gpu_blocks) == (3, 8 + 2)
    assert cohort.tokens == computed


def test_requests_that_need_nothing_of_the_store_run_beside(
    cohort: Cohort, engine: Engine, salt: int
) -> None:
    """While a load is held, requests for other prompts, stored and not, come and go."""
    trunk, other = blocks(1, 2, 3, 4, salt=salt), blocks(11, 12, salt=salt)
    prompts = {"leader": [*trunk, 7], "follower": [*trunk, 8], "other": [*other, 7], "short": [3, 4, 5]}
    computed = in_the_server_only(engine, prompts)
    engine.gate.concerns = lambda keys: keys[0].startswith(("leader", "follower"))
    engine.gate.open.clear()
    cohort.arrive(leader=prompts["leader"], follower=prompts["follower"])
    cohort.add(other=prompts["other"], short=prompts["short"], stranger=blocks(21, salt=salt))
    cohort.finish("other", "short", "stranger")
    engine.gate.open.set()
    cohort.finish()
    cohort.tokens.pop("stranger")
    assert cohort.tokens == computed
