"""Beside another connector in vLLM's MultiConnector: who finds tokens first loads them, request by request.

The other one loads asynchronously like a P/D connector, or within the step like ExampleConnector
(`other.py`). Besides what is asserted here, `World` checks each slot read, that no two loads write into one
block, all tokens and all free blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]

pytestmark = [
    pytest.mark.parametrize("mode", ["attach", "park"]),
    pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"]),
]


@pytest.fixture(params=["before", "after"])
def order(request: pytest.FixtureRequest) -> str:
    """Where the other connector stands."""
    return str(request.param)


@pytest.fixture(params=["async", "sync"])
def other_loads(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_one_get_for_all_who_load_from_the_store(like: Make, order: str, other_loads: str) -> None:
    w = like(other=order, other_loads=other_loads)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    requests = [w.add(prompt, tokens=3) for _ in range(4)]
    w.run()
    assert w.gets == 1
    assert [w.tokens_computed(r) for r in requests] == [2 + 2] * 4
    assert not any(w.tokens_borrowed(r) for r in requests)


def test_whoever_comes_first_loads_what_both_have(like: Make, order: str, other_loads: str) -> None:
    """The other one: nothing of ours is in the air. Asynchronously, it loads for each request; within the
    step, for the first, and the rest hit that."""
    w = like(other=order, other_loads=other_loads, hold=True, blocks=30)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    w.store.lend(prompt)
    requests = [w.add(prompt, tokens=2) for _ in range(3)]
    w.step(3)
    flights = w.layer_counters()["flights"]
    w.run()
    borrowed = sum(w.tokens_borrowed(r) for r in requests)
    if order == "before":
        assert (flights, w.gets, borrowed) == (0, 0, {"async": 3, "sync": 1}[other_loads] * 16)
    else:
        assert (flights, w.gets, borrowed) == (1, 1, 0)


def test_who_is_given_to_the_other_connector_does_not_touch_the_flight(like: Make, mode: str) -> None:
    """The other connector comes first, and gets the blocks while ours has them in the air: as many tokens as
    the newcomer would adopt. In attach mode it loads them there, into blocks of its own. In park mode ours
    answers "ask again", which MultiConnector takes for all: the newcomer waits for the flight."""
    w = like(other="before", hold=True)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    leader = w.add(prompt)
    w.step(2)
    w.store.lend(prompt)
    newcomer = w.add(prompt, tokens=2)
    w.step(3)
    assert w.loads == [leader]
    assert w.layer_counters()["attached"] == (0 if mode == "attach" else 1)
    late = w.add(prompt)
    w.run()
    assert w.gets == 1
    assert w.tokens_borrowed(newcomer) == (16 if mode == "attach" else 0)
    assert [w.status(r) for r in (leader, newcomer, late)] == ["length"] * 3


def test_the_other_connector_has_more(like: Make, order: str) -> None:
    """The first that has anything is chosen, though the other has more: vLLM's rule. The rest is computed."""
    w = like(other=order)
    prompt = w.prompt("abcdef", tail=2)
    w.store.put(prompt[:8])
    w.store.lend(prompt)
    requests = [w.add(prompt) for _ in range(3)]
    w.run()
    assert w.gets == (order == "after")
    assert w.tokens_computed(requests[0]) == (2 if order == "before" else 18)
    assert [w.status(r) for r in requests] == ["length"] * 3


def test_ours_fails_and_the_other_has_it(like: Make) -> None:
    """Whoever falls back is asked anew, and takes what the other connector has: nobody is wrong or stuck."""
    w = like(other="after", recompute=True)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    w.store.lend(prompt)
    w.store.fail(prompt, block=0)
    requests = [w.add(prompt, tokens=2) for _ in range(3)]
    w.run()
    assert [w.status(r) for r in requests] == ["length"] * 3
    assert w.gets <= 2
    assert sum(w.tokens_borrowed(r) for r in requests) >= 16


@pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])
def test_the_others_load_fails_while_ours_is_in_the_air(like: Make, recompute: bool) -> None:
    """Its reports name requests, or blocks, that are not ours: our flight and its followers go on."""
    for timing in range(12):
        w = like(other="before", other_fails=True, recompute=recompute, timing=timing, ranks=2, blocks=40)
        mine, theirs = w.prompt("abcd", tail=2), w.prompt("efgh", tail=2)
        w.store.put(mine)
        w.store.lend(theirs)
        ours = [w.add(mine, tokens=2) for _ in range(3)]
        others = [w.add(theirs, tokens=2) for _ in range(3)]
        w.run()
        assert w.gets == 1
        assert [w.tokens_computed(r) for r in ours] == [2 + 1] * 3
        assert {w.status(r) for r in others} <= ({"length"} if recompute else {"length", "error"})


def test_a_leader_is_aborted_and_the_others_sends_go_on(like: Make, mode: str, order: str) -> None:
    """The other connector keeps the blocks of some finished requests until they are sent."""
    w = like(other=order, hold=True, blocks=40)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    leader, *followers = [w.add(prompt, tokens=2) for _ in range(6)]
    w.step(3)
    w.abort(leader)
    w.run()
    assert [w.status(r) for r in followers] == ["length"] * 5
    assert w.gets == {"attach": 1, "park": 2}[mode]


def test_deadlines_and_aborts_are_acknowledged_through_multiconnector(like: Make, order: str) -> None:
    """Who waits without a load of its own is let go by the worker's word, which MultiConnector passes on."""
    w = like(other=order, options={"deadline_base_s": 1.0, "deadline_per_token_s": 0.0}, ranks=2)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    leader, late, gone = [w.add(prompt, tokens=2) for _ in range(3)]
    w.hang(leader)
    w.step(3)
    w.abort(gone)
    w.step(3)
    assert w.status(late) != "length"
    w.advance(1.0)
    w.step(8)
    assert (w.status(late), w.loads) == ("length", [leader])
    w.run()


def test_a_reset_with_both_in_the_air(like: Make, order: str) -> None:
    w = like(other=order, hold=True, blocks=40)
    mine, theirs = w.prompt("abcd", tail=2), w.prompt("efgh", tail=2)
    w.store.put(mine)
    w.store.lend(theirs)
    requests = [w.add(prompt, tokens=2) for prompt in (mine, theirs, mine, theirs)]
    w.step(3)
    assert not w.reset(connector=True), "blocks are in use"
    w.run()
    assert {w.status(r) for r in requests} == {"length"}
