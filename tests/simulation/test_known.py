"""Known bugs of vLLM and of the stock connector: each shown once, so that we notice when one is mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from . import violation

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]


def a_broken_key(w: World) -> None:
    prompt = w.prompt("abc")
    w.store.put(prompt)
    w.store.fail(prompt, block=0)
    w.add(prompt)
    w.run()


def a_short_read(w: World) -> None:
    prompt = w.prompt("abc")
    w.store.put(prompt)
    w.fault("short")
    w.add(prompt)
    w.run()


def a_lost_thread(w: World) -> None:
    prompt = w.prompt("abc")
    w.store.put(prompt)
    w.fault("exit")
    w.add(prompt)
    w.run()


def a_reset(w: World) -> None:
    prompt = w.prompt("abc")
    w.add(prompt, tokens=9)
    w.step(3)
    w.reset(running=True)
    w.run()


CASES = {
    "BROKEN_KEY": (a_broken_key, {"recompute": True}),
    "SHORT_READ": (a_short_read, {}),
    "LOST_THREAD": (a_lost_thread, {}),
    "RESET_RUNNING": (a_reset, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_stock_has_it(world: Make, name: str) -> None:
    from . import known

    play, fields = CASES[name]
    with pytest.raises(violation.Failure) as caught:
        play(world(mode="stock", **fields))
    assert caught.value.known == getattr(known, name)


@pytest.mark.parametrize("mode", ["attach", "park"])
@pytest.mark.parametrize("name", CASES)
def test_ours_has_not(world: Make, name: str, mode: str) -> None:
    play, fields = CASES[name]
    w = world(mode=mode, **fields)
    play(w)
    assert w.gets <= 1


def test_synchronous_loads_end_the_engine(world: Make) -> None:
    """`load_async: false`: the store worker asserts it true in its first step, whatever there is to load."""
    w = world(mode="stock", load_async=False)
    w.add(w.prompt("abc"))
    with pytest.raises(violation.Crash, match="load_async must be True"):
        w.step()


@pytest.mark.parametrize(("mode", "seed"), [("stock", 129), ("attach", 26)])
def test_a_preempted_block_stays_in_the_cache(mode: str, seed: int) -> None:
    """vLLM's own; `known.heal` takes it out of the way."""
    from . import campaign
    from .known import PREEMPTED_BLOCK

    fixed = {"policy": "priority", "blocks": 13, "max_seqs": 8, "reserve_full": False}
    assert PREEMPTED_BLOCK in campaign.run(mode, [seed], heal=False, **fixed).known
    healed = campaign.run(mode, [seed], heal=True, **fixed)
    assert not healed.failures
    assert not healed.known


@pytest.mark.parametrize("mode", ["stock", "attach", "park"])
def test_two_requests_preempt_each_other(world: Make, mode: str) -> None:
    """vLLM's own, as seed 93 of shadow mode has found it. Thirteen blocks: one request hits eight in the
    prefix cache, the other may not read the cache and computes seven."""
    from .known import PREEMPTING_EACH_OTHER

    w = world(mode=mode, blocks=13, token_budget=12, long_prefill=9)
    w.add(w.prompt("bbcbcabc"))
    w.step(6)
    w.add(w.prompt("bbcbca"), read_cache=False)
    w.add(w.prompt("bbcbcabc", tail=3), tokens=2)
    with pytest.raises(violation.Stuck) as caught:
        w.run()
    assert caught.value.known == PREEMPTING_EACH_OTHER


@pytest.mark.parametrize(
    ("mode", "lost"), [("stock", True), ("shadow", True), ("attach", False), ("park", False)]
)
def test_a_request_that_is_padded_with_drafts_saves_what_it_has(world: Make, mode: str, lost: bool) -> None:
    """Of a prompt of five tokens four are loaded. The one left is padded by three drafts to a whole block,
    which has no hash yet: stock's save thread asserts. Ours saves no more than there is."""
    w = world(mode=mode, drafts=3)
    prompt = w.prompt("a")
    w.store.put(prompt)
    request = w.add(prompt)
    w.run()
    assert w.status(request) == "length"
    assert (w.lost_saves > 0) == lost


@pytest.mark.parametrize("mode", ["attach", "park"])
def test_drafts_are_not_saved_as_the_tokens_that_come_instead(world: Make, mode: str) -> None:
    """A block of two: the token left of a prompt and one draft. By the time it is saved, the request has said
    another token, and the block has that one's hash."""
    from .known import PADDING_SAVED

    def play(w: World) -> None:
        prompt = w.prompt("a")
        w.store.put(prompt)
        first = w.add(prompt)
        w.run()
        w.reset()
        again = w.add([*prompt, *w.said(first), 5])
        w.run()
        assert w.status(again) == "length"

    with pytest.raises(violation.Violation) as caught:
        play(world(mode="stock", drafts=2, block_size=2))
    assert caught.value.known == PADDING_SAVED
    play(world(mode=mode, drafts=2, block_size=2))


@pytest.mark.parametrize("mode", ["stock", "attach", "park"])
def test_embeddings_end_the_engine_under_model_runner_v1(world: Make, mode: str) -> None:
    """The stock scheduler side asserts that there are prompt tokens: its KV events want them, on or off."""
    w = world(mode=mode)
    w.add(w.prompt("abc"), embeds=True)
    with pytest.raises(violation.Crash, match="AssertionError"):
        w.step()
