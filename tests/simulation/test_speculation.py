"""Speculative decoding: drafts disturb nobody's blocks, and with EAGLE or MTP nobody starts behind a block
that stock would compute again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]

EAGLE = {"drafts": 2, "drafter": "eagle"}
MODES = pytest.mark.parametrize("mode", ["attach", "park"])


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_drafts_are_accepted_and_rejected(world: Make, drafter: str, async_scheduling: bool) -> None:
    """About the simulation itself: a drafter that is right now and then saves steps, for the same text."""
    steps = []
    for drafts in (0, 3):
        w = world(mode="stock", drafts=drafts, drafter=drafter, async_scheduling=async_scheduling)
        request = w.add(w.prompt("ab"), tokens=40)
        w.run()
        assert w.status(request) == "length"
        steps.append((w.loop.steps, w.tokens_computed(request)))
    (plain, computed), (speculating, computed_and_drafted) = steps
    assert speculating < 0.8 * plain
    assert computed_and_drafted > computed, "some drafts are rejected"


@MODES
@pytest.mark.parametrize("tail", [0, 1])
@pytest.mark.parametrize(
    ("letters", "gets"),
    [
        pytest.param("abcd", 1, id="the same"),
        pytest.param("ab", 1, id="shorter"),
        pytest.param("a", 1, id="one block"),
        pytest.param("axyz", 1, id="another second block"),
        pytest.param("abxy", 1, id="another third block"),
        pytest.param("abcx", 1, id="another block than the one that the leader has left out"),
        pytest.param("abcdx", 1, id="another block than the one that the leader has not found"),
        pytest.param("abcde", 2, id="one block more"),
        pytest.param("abcdef", 2, id="two blocks more"),
    ],
)
def test_nobody_computes_less_than_in_stock(
    world: Make, mode: str, letters: str, gets: int, tail: int
) -> None:
    """The store has abcdef. A request for abcd loads abc and computes d, which its lookup has found but left
    out. Where the next one starts depends on what the two share, as in stock vLLM."""
    computed = []
    for each in ("stock", mode):
        w = world(mode=each, lanes=2, hold=True, **EAGLE)
        w.store.put(w.prompt("abcdef"))
        leader = w.add(w.prompt("abcd"), name="leader")
        w.step(2)
        assert w.loads == [leader]
        follower = w.add(w.prompt(letters, tail=tail), name="follower")
        w.step(3)
        w.land()
        w.run()
        computed.append((w.tokens_computed(leader), w.tokens_computed(follower)))
    assert computed[0] == computed[1]
    # vLLM's own cache finds a block less than a lookup, where a prompt ends with a block.
    assert w.gets <= gets + (mode == "park" and not tail)


@MODES
def test_those_who_ask_for_the_same_need_one_lookup(world: Make, mode: str) -> None:
    """The leader's lookup has found the block that it leaves out: its followers know that too."""
    w = world(mode=mode, hold=True, **EAGLE)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    requests = [w.add(prompt) for _ in range(4)]
    w.step(4)
    assert (w.loads, w.lookups) == ([requests[0]], 1)
    w.run()
    assert w.gets == 1
    assert [w.tokens_computed(r) for r in requests] == [4 + 2] * 4


@MODES
def test_a_load_whose_end_cannot_be_read_is_shared_up_to_there(world: Make, mode: str) -> None:
    """The third of four blocks cannot be read. The leader is told so; later requests load and share the first
    two, since the third has been found, if not read."""
    w = world(mode=mode, recompute=True, blocks=40, **EAGLE)
    prompt = w.prompt("abcdef")
    w.store.put(prompt)
    w.store.fail(prompt, block=2)
    w.add(prompt)
    w.run()
    assert w.reset()
    before = w.gets
    later = [w.add(prompt) for _ in range(3)]
    w.run()
    assert w.gets == before + 1
    assert [w.status(r) for r in later] == ["length"] * 3
