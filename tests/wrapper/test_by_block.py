"""Failures that a child reports by block, where blocks are shared."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from connector_patch.byblock import Arrivals
from connector_patch.wrapped import WorkerMetadata


def arrivals() -> Arrivals:
    """`first` loads blocks 4 to 7, `second` blocks 8 to 10."""
    made = Arrivals()
    made.expect({"first": [(4,), (5,), (6,), (7,)], "second": [(8,), (9,), (10,)]})
    return made


def heard(made: Arrivals, bad: set[int], *finished: str, failed: tuple[str, ...] = ()) -> set[str]:
    results = KVConnectorTransferResults(finished_recving=set(finished), failed_recving=set(failed))
    told = made.heard(results, bad)
    assert told.finished_recving == set(finished)
    return told.failed_recving


def test_a_bad_block_fails_the_request_whose_load_it_is_and_says_what_is_there() -> None:
    made = arrivals()
    assert heard(made, {6, 7}, "first") == {"first"}
    assert made.take_there() == {"first": 2}
    assert made.take_there() == {}


def test_blocks_of_two_loads_in_one_report() -> None:
    made = arrivals()
    assert heard(made, {5, 10}, "first", "second") == {"first", "second"}
    assert made.take_there() == {"first": 1, "second": 2}


def test_a_failure_that_is_known_before_the_load_has_ended() -> None:
    made = arrivals()
    assert heard(made, {7}) == {"first"}
    assert heard(made, {5}, "first") == {"first"}
    assert made.take_there() == {"first": 1}


def test_what_a_child_reports_by_request_stays_so() -> None:
    made = arrivals()
    assert heard(made, set(), "second", failed=("second",)) == {"second"}
    assert made.take_there() == {}, "nothing is proved to be there"


def test_a_load_that_has_ended_cannot_fail_any_more() -> None:
    """Its blocks may be another's by now; who has them was told."""
    made = arrivals()
    heard(made, set(), "first")
    made.expect({"third": [(5,)]})
    assert heard(made, {5}) == {"third"}


def test_a_block_that_nobody_loads_is_nobodys_failure() -> None:
    """LMCache names all blocks of its chunks, those too that a request has had before: vLLM would take them
    for failed wherever they are."""
    assert heard(arrivals(), {3, 4}, "first") == {"first"}


def test_several_kv_cache_groups() -> None:
    made = Arrivals()
    made.expect({"first": [(4,), (5, 14), (6, 15)]})
    assert heard(made, {14}, "first") == {"first"}
    assert made.take_there() == {"first": 1}


class FakeMeta(KVConnectorWorkerMetadata):
    def __init__(self, saves: int) -> None:
        self.saves = saves

    def aggregate(self, other: Any) -> FakeMeta:
        return FakeMeta(self.saves + other.saves)


@pytest.mark.parametrize(
    ("one", "two", "saves"),
    [(None, None, None), (FakeMeta(1), None, 1), (None, FakeMeta(2), 2), (FakeMeta(1), FakeMeta(2), 3)],
)
def test_of_several_ranks_what_is_there_is_there_on_all(one: Any, two: Any, saves: int | None) -> None:
    both = WorkerMetadata(one, {"first": 3, "second": 1}).aggregate(WorkerMetadata(two, {"first": 2}))
    assert both.there == {"first": 2, "second": 1}
    assert (both.child.saves if both.child is not None else None) == saves


def test_a_child_that_names_all_blocks_of_a_failed_load_and_some_before_it() -> None:
    """LMCache: block 7 lies in the chunk that the second load begins in. The first load has not failed."""
    made = Arrivals(names_all=True)
    made.expect({"first": [(4,), (5,), (6,), (7,)], "second": [(8,), (9,), (10,)]})
    assert heard(made, {7, 8, 9, 10}, "second") == {"second"}
    assert made.take_there() == {"second": 0}
    assert heard(made, {4, 5, 6, 7}, "first") == {"first"}
