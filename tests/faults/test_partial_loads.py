"""A load that fails in part lands in part: nobody computes more than with the stock connector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.core.stats import Reason
from tests.faults.cohort import Cohort, tailed
from tests.faults.computed import computed, hashes
from tests.faults.scripted_store import Fault, fail_keys, hang, raise_, scripted, unreadable
from tests.support import BLOCK, blocks, store_prefixes

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm
    from tests.faults.checksums import Guard

pytestmark = pytest.mark.engine

TAIL, DECODED = 4, 3
"""Tokens that every request computes: behind its prefix, and one by one after the first generated one."""


@pytest.fixture
def recompute(engine: Engine) -> Iterator[None]:
    before = engine.scheduler.recompute_kv_load_failures
    engine.scheduler.recompute_kv_load_failures = True
    yield
    engine.scheduler.recompute_kv_load_failures = before


def from_block(place: int, of: int = 4) -> int:
    """Tokens computed by who has the blocks before this one."""
    return (of - place) * BLOCK + TAIL + DECODED


@pytest.mark.usefixtures("recompute", "guarded")
class TestNeverMoreThanStock:
    def test_the_control(self, stock: dict[str, Any]) -> None:
        """Stock recomputes from the first bad block, each request for itself."""
        for place in (1, 2, 3):
            assert stock["bad key"][str(place)] == dict.fromkeys(("r0", "r1", "r2"), from_block(place))

    @pytest.mark.parametrize("place", range(4))
    @pytest.mark.parametrize("followers", [0, 2])
    def test_wherever_the_bad_key_is(
        self, cohort: Cohort, reference: Arm, trunk: list[int], place: int, followers: int
    ) -> None:
        """Issue 11: the last of 256 blocks evicted cost 4,096 tokens instead of 16. The request that loads
        computes from the bad block on, in the blocks it has; the others find what it has computed."""
        names = ["r0", "r1", "r2"][: 1 + followers]
        cohort.engine.gate.open.clear()
        bad = unreadable(hashes(cohort.engine, trunk)[place])
        with scripted(cohort.engine, bad), computed(cohort.engine) as counts:
            cohort.arrive(**tailed(trunk, *names))
            cohort.engine.gate.open.set()
            cohort.finish()
        assert counts == {"r0": from_block(place), **dict.fromkeys(names[1:], from_block(4))}
        assert cohort.engine.recorder.take().gets == 1
        cohort.expect_equal(reference)

    def test_a_local_hit_before_the_load_is_kept(
        self, cohort: Cohort, reference: Arm, trunk: list[int]
    ) -> None:
        """Two blocks are there, and the first of the two that are loaded fails."""
        cohort.add(warm=[*trunk[: 2 * BLOCK], 11])
        cohort.finish()
        with scripted(cohort.engine, fail_keys(0)), computed(cohort.engine) as counts:
            cohort.add(**tailed(trunk, "r0"))
            cohort.finish()
        assert counts == {"r0": from_block(2)}
        assert cohort.engine.recorder.take().gets == 2
        cohort.expect_equal(reference)

    def test_it_goes_on_in_the_blocks_it_has(self, cohort: Cohort, reference: Arm, trunk: list[int]) -> None:
        """As with stock. Whoever would have to be given room again can be overtaken, its prefix evicted, and
        then computes more."""
        get = hang(then=fail_keys(3))
        with scripted(cohort.engine, get), computed(cohort.engine) as counts:
            cohort.arrive(**tailed(trunk, "r0"))
            own = cohort.blocks("r0")
            assert len(own) == 4
            with cohort.free(1):  # for the tail
                get.release.set()
                cohort.until(lambda: cohort.running("r0"))
                assert cohort.blocks("r0") > own
                cohort.finish()
        assert counts == {"r0": from_block(3)}
        cohort.expect_equal(reference)

    def test_an_own_load_that_fails_behind_one_that_is_in_the_air(
        self, cohort: Cohort, reference: Arm, salt: int
    ) -> None:
        """R adopts the first four blocks, which another loads, and loads four more, of which the third fails
        before the first four have landed. R goes on waiting for those, and computes from the seventh on."""
        trunk = blocks(*range(1, 9), salt=salt)
        store_prefixes(cohort.engine, trunk)
        slow = hang()
        with (
            scripted(cohort.engine, slow, fail_keys(2)),
            computed(cohort.engine) as counts,
        ):
            cohort.arrive(a=[*trunk[: 4 * BLOCK], *(9 for _ in range(TAIL))])
            cohort.arrive(**tailed(trunk, "r"))
            cohort.until(lambda: cohort.id("r") not in cohort.engine.connector.layer._loads)
            cohort.step(5)
            assert not counts
            slow.release.set()
            cohort.finish()
        assert counts == {"a": from_block(4), "r": from_block(6, of=8)}
        cohort.expect_equal(reference)

    @pytest.mark.parametrize(
        "fault",
        [fail_keys(0), raise_(RuntimeError("the wire is cut")), raise_(SystemExit())],
        ids=["error code", "exception", "thread death"],
    )
    def test_batches_after_the_one_that_fails_were_never_fetched(
        self,
        cohort: Cohort,
        reference: Arm,
        salt: int,
        fault: Fault,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Disk offload: six keys in three Gets of two. The second fails, the third is not made; what is
        there are the first two blocks. (Stock takes the third batch for loaded: wrong tokens.)"""
        trunk = blocks(*range(1, 7), salt=salt)
        store_prefixes(cohort.engine, trunk)
        for thread in cohort.engine.worker_connector.connector_worker.kv_recv_threads:
            size = 4096  # what a key is taken to need at least
            monkeypatch.setattr(thread, "disk_offload_buffer_budget_bytes", 1 << 30)
            monkeypatch.setattr(thread, "usable_disk_offload_buffer_budget_bytes", size)
        monkeypatch.setattr(
            "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker"
            "._estimate_disk_offload_staging_bytes",
            lambda sizes: 2048,
        )
        third_block = hashes(cohort.engine, trunk)[2].hex()
        fault = Fault(fault.act, 1, lambda keys: any(key.endswith(third_block) for key in keys))
        with scripted(cohort.engine, fault), computed(cohort.engine) as counts:
            cohort.add(**tailed(trunk, "r0"))
            cohort.finish()
        assert sorted(map(len, cohort.engine.recorder.complete)) in ([2], [2, 2])
        assert counts == {"r0": from_block(2, of=6)}
        cohort.expect_equal(reference)

    def test_after_a_preemption_it_may_load_again(
        self, cohort: Cohort, reference: Arm, trunk: list[int], forgetful: None
    ) -> None:
        """Then what a failed load has taught is forgotten: it asks the store, and the second load is good."""
        engine, prompts = cohort.engine, tailed(trunk, "r0")
        stock = engine.connector.connector_scheduler
        with scripted(engine, fail_keys(0)):
            engine.add("r0", prompts["r0"], max_tokens=60)
            cohort.until(lambda: cohort.running("r0"))
            assert engine.recorder.take().gets == 1
            # Blocks that are being saved are held, and vLLM resets nothing while a block is held.
            cohort.until(lambda: not stock._pinned_saves)
            assert cohort.running("r0")
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            cohort.finish("r0")
        assert engine.recorder.take().gets == 1
        assert cohort.tokens == reference.ask("burst", prompts=prompts, max_tokens=60)["tokens"]


class TestWhoNeedsWhat:
    def test_followers_whose_blocks_are_all_there_do_not_notice(
        self, cohort: Cohort, reference: Arm, salt: int, policy: str
    ) -> None:
        """Six blocks, the fourth is bad. Who needs three or fewer is ready; who needs more falls back. Under
        "fail" the leader ends with an error, and what it has loaded is there for all the same."""
        trunk = blocks(*range(1, 7), salt=salt)
        store_prefixes(cohort.engine, trunk)
        needs = {"leader": 6, "one": 1, "three": 3, "four": 4, "all": 6}
        prompts = {name: [*trunk[: n * BLOCK], *(7 + n for _ in range(TAIL))] for name, n in needs.items()}
        stats = cohort.table.stats
        before = stats.cut, stats.blocks_cut, stats.landed, stats.failed
        get = hang(then=fail_keys(3))
        with scripted(cohort.engine, get), computed(cohort.engine) as counts:
            cohort.arrive(**prompts)
            get.release.set()
            cohort.finish()
        assert cohort.fell_back() == {Reason.LEADER_FAILED: 2}
        assert (stats.cut, stats.blocks_cut) == (before[0] + 1, before[1] + 3)
        assert counts["one"] == counts["three"] == from_block(4)
        failed = ["leader"] if policy == "fail" else []
        # "fail": "four" loads the fourth block once more, and "all" what comes after it.
        # "recompute": they hit what the leader computes.
        loads = 3 if policy == "fail" else 1
        counted = cohort.engine.recorder.take()
        assert (counted.gets, counted.keys) == (loads, 6 + (1 + 2 if policy == "fail" else 0))
        assert (stats.landed, stats.failed) == (before[2] + loads, before[3])
        cohort.expect_equal(reference, *failed)

    def test_who_comes_after_a_leader_that_was_failed_hits_what_it_has_loaded(
        self, cohort: Cohort, reference: Arm, trunk: list[int], guarded: Guard, forgetful: None
    ) -> None:
        """Policy "fail", three of four blocks, nobody else waiting: published before vLLM frees them."""
        with scripted(cohort.engine, fail_keys(3)):
            cohort.add(**tailed(trunk, "leader"))
            cohort.finish()
        with scripted(cohort.engine, unreadable(hashes(cohort.engine, trunk)[3])):
            cohort.add(**tailed(trunk, "again"))
            cohort.finish()
        assert [len(keys) for keys in cohort.engine.recorder.complete] == [4, 1]
        cohort.expect_equal(reference, "leader", "again")

    def test_of_an_aborted_leaders_load_the_good_part_lands(
        self, cohort: Cohort, reference: Arm, trunk: list[int]
    ) -> None:
        """The follower needs the first two blocks only."""
        get = hang(then=fail_keys(2))
        with scripted(cohort.engine, get), computed(cohort.engine) as counts:
            cohort.arrive(**tailed(trunk, "leader"))
            cohort.arrive(short=[*trunk[: 2 * BLOCK], *(9 for _ in range(TAIL))])
            cohort.abort("leader")
            get.release.set()
            cohort.finish()
        assert counts == {"short": from_block(4)}
        assert cohort.engine.recorder.take().gets == 1
        cohort.expect_equal(reference)


def test_what_several_ranks_tell_in_one_step_is_the_least_of_it(engine: Engine) -> None:
    """In any order of the ranks; reports of saves are added up as before."""
    from itertools import permutations

    from connector_patch.partial import PartialLoads

    words = [({1: 1}, {"a": 3, "b": 0}), ({1: 1, 2: 1}, {"a": 1}), ({}, {"a": 2, "c": 4})]
    for order in permutations(words):
        first, *others = (PartialLoads(dict(saves), dict(there)) for saves, there in order)
        for other in others:
            assert first.aggregate(other) is first
        assert first.there == {"a": 1, "b": 0, "c": 4}
        assert first.completed_saves == {1: 2, 2: 1}
