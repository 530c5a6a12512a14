"""What vLLM counts of a prompt's tokens where some of them were adopted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import fail_keys, hang, scripted
from tests.support import BLOCK, blocks, store_prefixes

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


def sources(cohort: Cohort, name: str) -> tuple[int, int, int]:
    """Prompt tokens that vLLM takes for local, loaded, and computed."""
    stats = cohort.request(name).prefill_stats
    return stats.num_local_cached_tokens, stats.num_external_cached_tokens, stats.num_computed_tokens


def test_adopted_tokens_are_local_and_loaded_ones_are_not(
    cohort: Cohort, reference: Arm, salt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 tokens were shown for 256 loaded. `vllm:prompt_tokens_by_source` and
    `vllm:prompt_tokens_cached_by_source` tell them apart."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.metrics.stats import PrefixCacheStats

    counted: Counter[CacheHitSource] = Counter()
    stock = PrefixCacheStats.record

    def record(self: PrefixCacheStats, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        counted.update(kwargs.get("hits_by_source") or {})

    trunk = blocks(*range(1, 7), salt=salt)
    store_prefixes(cohort.engine, trunk)
    monkeypatch.setattr(PrefixCacheStats, "record", record)
    leader = [*trunk[: 4 * BLOCK], 7, 7]
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=leader, same=[*leader, 8], longer=[*trunk, 9])
        assert sources(cohort, "leader") == (0, 4 * BLOCK, 2)
        assert sources(cohort, "same") == (4 * BLOCK, 0, 3)
        assert sources(cohort, "longer") == (4 * BLOCK, 2 * BLOCK, 1)
        loaded, adopted = (4 + 2) * BLOCK, (4 + 4) * BLOCK
        expected = {CacheHitSource.EXTERNAL_UNSPECIFIED: loaded, CacheHitSource.DEVICE: adopted}
        assert counted == expected
        get.release.set()
        cohort.finish()
    cohort.expect_equal(reference)


def test_who_falls_back_is_counted_by_what_it_gets_in_the_end(
    cohort: Cohort, reference: Arm, trunk: list[int]
) -> None:
    """Policy "fail", the third of four blocks is bad: the follower starts again, hits two and loads two."""
    first, second = hang(then=fail_keys(2)), hang()
    with scripted(cohort.engine, first, second):
        cohort.arrive(**tailed(trunk, "leader", "follower"))
        assert sources(cohort, "follower") == (4 * BLOCK, 0, 4)
        first.release.set()
        cohort.until(second.reached.is_set)
        assert sources(cohort, "follower") == (2 * BLOCK, 2 * BLOCK, 4)
        second.release.set()
        cohort.finish()
    cohort.expect_equal(reference, "leader")
