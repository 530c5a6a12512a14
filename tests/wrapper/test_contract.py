"""What a wrapped connector is asked and told, over a scripted child."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from connector_patch.contract import Contract
from tests.wrapper.fakes import FakeChild, wrapper

SIZE = 4


@pytest.fixture
def child() -> FakeChild:
    """Its answer to a lookup, by default, is 8 tokens."""
    found: FakeChild = wrapper().child
    found.answers["get_num_new_matched_tokens"] = (8, True)
    return found


@pytest.fixture
def contract(child: FakeChild) -> Contract:
    return Contract(child, SIZE, asked_first=True)


def request(name: str = "r1") -> Any:
    return SimpleNamespace(request_id=name, status=RequestStatus.WAITING, num_tokens=100)


def blocks(*ids: int) -> Any:
    return SimpleNamespace(blocks=([SimpleNamespace(block_id=i, is_null=not i) for i in ids],))


def test_what_is_pending_is_asked_behind_and_counted_in(contract: Contract, child: FakeChild) -> None:
    assert contract.ask(request(), 4, pending=12) == (20, True)
    assert child.calls[-1][1][1] == 16


def test_nothing_behind_what_is_pending(contract: Contract, child: FakeChild) -> None:
    child.answers["get_num_new_matched_tokens"] = (0, False)
    assert contract.ask(request(), 4, pending=12) == (12, True)
    assert contract.ask(request(), 4) == (0, False)


@pytest.mark.parametrize("unready", [(None, True), (None, False)])
def test_a_lookup_that_is_not_ready(contract: Contract, child: FakeChild, unready: Any) -> None:
    """LMCache says that it will load asynchronously, others do not."""
    child.answers["get_num_new_matched_tokens"] = unready
    assert contract.ask(request(), 0, pending=8) == (None, False)


def test_who_joins_less_than_it_was_asked_about_is_asked_again(contract: Contract, child: FakeChild) -> None:
    contract.ask(request(), 0, pending=12)
    asked = len(child.calls)
    assert contract.narrow("r1", 12, 8) == 8
    assert len(child.calls) == asked, "that is what it has answered"
    child.answers["get_num_new_matched_tokens"] = (16, True)
    assert contract.narrow("r1", 4, 16) == 16
    assert child.calls[-1][1][1] == 4


@pytest.mark.parametrize(("second", "own"), [((None, True), None), ((4, True), 4), ((0, False), 0)])
def test_another_second_answer_counts(
    contract: Contract, child: FakeChild, second: Any, own: int | None
) -> None:
    contract.ask(request(), 0, pending=12)
    child.answers["get_num_new_matched_tokens"] = second
    assert contract.narrow("r1", 8, 12) == own


def test_who_goes_alone_is_asked_about_all_of_it(contract: Contract, child: FakeChild) -> None:
    answer = contract.ask(request(), 4, pending=12)
    child.answers["get_num_new_matched_tokens"] = (20, True)
    assert contract.alone(request(), 4, answer) == (20, True)
    assert child.calls[-1][1][1] == 4


def test_the_child_is_told_what_is_left_for_it(contract: Contract, child: FakeChild) -> None:
    one = request()
    contract.ask(one, 4, pending=4)
    assert contract.allocated(one, blocks(9, 8, 7, 6, 5), 8) == range(2, 4)
    assert child.calls[-1] == ("update_state_after_alloc", (one, child.calls[-1][1][1], 8), {})
    assert contract.planned("r1") == range(2, 4)
    assert contract.take_new() == {"r1": [(7,), (6,)]}
    assert contract.take_new() == {}


def test_who_loads_nothing_of_its_own_is_told_so(contract: Contract, child: FakeChild) -> None:
    """So the child lets go of what its lookup has pinned."""
    one = request()
    contract.ask(one, 0, pending=8)
    contract.withdraw("r1")
    assert contract.allocated(one, blocks(9, 8, 7), 0) is None
    assert child.calls[-1][1][2] == 0
    assert contract.take_new() == {}


def test_part_of_a_block_is_loaded_and_not_shared(contract: Contract, child: FakeChild) -> None:
    """LMCache leaves the last token of a prompt that it has in full to be computed, but loads its block."""
    child.answers["get_num_new_matched_tokens"] = (11, True)
    one = request()
    contract.ask(one, 0)
    assert contract.allocated(one, blocks(9, 8, 7), 11) == range(2)
    assert contract.take_new() == {"r1": [(9,), (8,), (7,)]}


def test_less_than_a_block_is_a_load_too(contract: Contract, child: FakeChild) -> None:
    """Or its end would be nobody's."""
    child.answers["get_num_new_matched_tokens"] = (3, True)
    one = request()
    contract.ask(one, 4)
    found = contract.allocated(one, blocks(9, 8), 3)
    assert found is not None
    assert len(found) == 0
    assert contract.take_new() == {"r1": [(8,)]}


def test_who_starts_again_is_shown_as_after_a_preemption(contract: Contract, child: FakeChild) -> None:
    """LMCache keeps the blocks that a request was given first, and would save from them."""
    seen: list[RequestStatus] = []

    def answer(request: Any, _tokens: int) -> Any:
        seen.append(request.status)
        return 8, True

    child.answers["get_num_new_matched_tokens"] = answer
    one = request()
    contract.ask(one, 0)
    contract.allocated(one, blocks(9, 8), 8)
    contract.ask(one, 0)
    assert seen == [RequestStatus.WAITING, RequestStatus.PREEMPTED]
    assert one.status is RequestStatus.WAITING
    contract.forget("r1")
    contract.ask(request(), 0)
    assert seen[-1] is RequestStatus.WAITING, "another request of the same name"


def test_the_question_that_is_owed(contract: Contract) -> None:
    assert contract.owed("r1", 0)
    one = request()
    contract.ask(one, 8)
    assert not contract.owed("r1", 8)
    assert contract.owed("r1", 0), "the child was told that eight tokens are there"
    contract.ask(one, 0)
    assert not contract.owed("r1", 0)
    contract.allocated(one, blocks(9, 8), 8)
    assert contract.owed("r1", 0), "if it starts again"
    assert contract.starts_again("r1")


def test_the_last_block_of_a_full_hit_is_not_shared(contract: Contract) -> None:
    """Its last token is computed once more, into that block."""
    one = request()
    one.num_tokens = 8
    contract.ask(one, 0)
    assert contract.allocated(one, blocks(9, 8), 8) == range(1)
    assert contract.take_new() == {"r1": [(9,), (8,)]}


def test_a_load_within_the_step_is_computed_instead(
    contract: Contract, child: FakeChild, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for another's load could not run it."""
    child.answers["get_num_new_matched_tokens"] = (8, False)
    assert contract.ask(request(), 0) == (0, False)
