"""vLLM's own connectors to CPU memory, alone and in our wrapper: real scheduler sides, simulated copies.

OffloadingConnector loads no key twice at a time: whoever needs one that is being loaded is asked again later,
for as long as that takes. SimpleCPUOffloadConnector loads for each. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]

LOADS, WAITS = "WAITING_FOR_REMOTE_KVS", "WAITING"
DEADLINE = {"deadline_base_s": 1.0, "deadline_per_token_s": 0.0}
OURS = pytest.mark.parametrize("mode", ["attach", "park"])
BOTH = pytest.mark.parametrize("store", ["offloading", "simple"])


def a_chain(w: World) -> list[str]:
    """Three turns of a conversation arrive at once: each needs what the one before it loads, and more."""
    w.store.put(w.prompt("abcdefghijkl"))
    requests = [w.add(w.prompt(letters)) for letters in ("abcd", "abcdefgh", "abcdefghijkl")]
    w.step(2)
    return requests


class TestConvoy:
    """Behind a load of OffloadingConnector."""

    def test_stock_has_each_wait_for_the_one_before(self, world: Make) -> None:
        w = world(mode="stock", store="offloading", hold=True)
        first, second, third = a_chain(w)
        assert w.loads == [first]
        assert [w.status(r) for r in (second, third)] == [WAITS] * 2
        w.land(first)
        w.step(3)
        assert w.loads == [second]
        assert w.status(third) == WAITS
        w.run()

    def test_ours_has_each_load_the_rest_at_once(self, world: Make) -> None:
        w = world(mode="attach", store="offloading", hold=True)
        requests = a_chain(w)
        assert w.loads == requests
        assert [w.status(r) for r in requests] == [LOADS] * 3
        w.run()
        assert [w.tokens_loaded(r) for r in requests] == [16] * 3

    def test_the_last_of_a_chain_is_answered_sooner(self, world: Make) -> None:
        """As many loads, of as many tokens, in the same copy queue: in fewer steps."""
        took, loads, steps = {}, {}, {}
        for mode in ("stock", "attach"):
            w = world(mode=mode, store="offloading", load_s=0.001, load_block_s=0.0)
            requests = a_chain(w)
            while any(w.status(r) != "length" for r in requests):
                w.step()
            took[mode], loads[mode], steps[mode] = w.now, w.gets, w.loop.steps
            w.run()
        assert loads["stock"] == loads["attach"] == 3
        assert steps["attach"] < steps["stock"]
        assert took["attach"] < took["stock"]

    def test_a_load_whose_request_is_gone_is_done_again_in_stock_alone(self, world: Make) -> None:
        loads = {}
        for mode in ("stock", "attach"):
            w = world(mode=mode, store="offloading", hold=True)
            prompt = w.prompt("abcd")
            w.store.put(prompt)
            first, second = w.add(prompt), w.add(prompt)
            w.step(2)
            w.abort(first)
            w.step(2)
            w.run()
            assert w.status(second) == "length"
            loads[mode] = w.gets
        assert loads == {"stock": 2, "attach": 1}

    def test_stock_waits_for_ever_for_a_load_that_hangs(self, world: Make) -> None:
        w = world(mode="stock", store="offloading")
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        w.hang(w.add(prompt, name="first"))
        w.step(2)
        second = w.add(w.prompt("ab", mark=1))  # needs two of the blocks
        for _ in range(100):
            w.advance(60.0)
            w.step()
        assert w.status(second) == WAITS
        w.run()

    @OURS
    @pytest.mark.parametrize("on_deadline", ["recompute", "load"])
    @pytest.mark.parametrize("v2_runner", [False, True])
    def test_ours_waits_until_its_deadline(
        self, world: Make, mode: str, on_deadline: str, v2_runner: bool
    ) -> None:
        """And then computes: what hangs is not to be had, whatever it was to do."""
        w = world(
            mode=mode,
            store="offloading",
            options={**DEADLINE, "on_deadline": on_deadline},
            v2_runner=v2_runner,
        )
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        first = w.add(prompt)
        w.hang(first)
        w.step(2)
        second = w.add(w.prompt("ab", mark=1))
        asked = w.now
        w.step(3)
        w.advance(1.0)
        while w.status(second) != "length":
            w.step()
            assert w.now < asked + 2.0
        assert w.loads == [first]
        assert w.tokens_computed(second) == 9
        w.run()

    @OURS
    def test_nobody_who_comes_later_waits_for_it(self, world: Make, mode: str) -> None:
        """It is overdue by then: nobody joins it, and the connector would put each off."""
        w = world(mode=mode, store="offloading", options=DEADLINE)
        prompt = w.prompt("abcd")
        w.store.put(w.prompt("abcdef"))
        first = w.add(prompt)
        w.hang(first)
        w.step(2)
        w.advance(60.0)
        w.step(3)
        later, longer = w.add(w.prompt("ab", mark=1)), w.add(w.prompt("abcdef"))
        w.step(8)
        assert [w.status(r) for r in (later, longer)] == ["length"] * 2
        assert w.loads == [first]
        w.run()


@BOTH
@OURS
class TestOneLoad:
    def test_for_all_who_need_it(self, world: Make, mode: str, store: str) -> None:
        w = world(mode=mode, store=store)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        requests = [w.add(prompt, tokens=3) for _ in range(4)]
        w.run()
        assert w.gets == 1
        assert [w.tokens_computed(r) for r in requests] == [2 + 2] * 4

    def test_whose_leader_is_aborted(self, world: Make, mode: str, store: str) -> None:
        w = world(mode=mode, store=store, hold=True)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        first, second = w.add(prompt), w.add(prompt)
        w.step(2)
        w.abort(first)
        w.step(2)
        w.run()
        assert w.status(second) == "length"
        assert w.gets == 1 or mode == "park"

    def test_whose_follower_is_aborted(self, world: Make, mode: str, store: str) -> None:
        w = world(mode=mode, store=store, hold=True)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        first, second, third = (w.add(prompt) for _ in range(3))
        w.step(2)
        w.abort(second)
        w.step(2)
        w.run()
        assert [w.status(r) for r in (first, third)] == ["length"] * 2
        assert w.gets == 1

    def test_that_hangs_is_left_at_the_deadline(self, world: Make, mode: str, store: str) -> None:
        w = world(mode=mode, store=store, options=DEADLINE)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        first = w.add(prompt)
        w.hang(first)
        w.step(2)
        second = w.add(prompt)
        asked = w.now
        w.step(3)
        w.advance(1.0)
        while w.status(second) != "length":
            w.step()
            assert w.now < asked + 2.0
        assert w.loads == [first]
        w.run()

    def test_in_the_air_at_a_reset(self, world: Make, mode: str, store: str) -> None:
        """What it brings is from before; nobody who adopts it reads it, and nothing of it is kept."""
        w = world(mode=mode, store=store, hold=True)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        requests = [w.add(prompt) for _ in range(3)]
        w.step(2)
        w.reset(connector=True)
        w.step(3)
        w.run()
        assert [w.status(r) for r in requests] == ["length"] * 3

    def test_in_a_pool_too_small_for_all(self, world: Make, mode: str, store: str) -> None:
        w = world(mode=mode, store=store, blocks=13, reserve_full=False)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        requests = [w.add(prompt, tokens=16) for _ in range(4)]
        w.run()
        assert [w.status(r) for r in requests] == ["length"] * 4
        assert w.gets < 4

    def test_of_a_request_that_reads_no_cache_and_is_preempted(
        self, world: Make, mode: str, store: str
    ) -> None:
        """Whom the connector is not asked about is stored from the blocks it had before."""
        w = world(mode=mode, store=store, blocks=20, v2_runner=True)
        w.add(w.prompt("bbcccabab", tail=4), tokens=8)
        w.add(w.prompt("bbcccabab", tail=4, mark=2), read_cache=False)
        w.run()


def test_a_full_hit_is_shared_but_for_its_last_block(world: Make) -> None:
    """OffloadingConnector loads all of a prompt of whole blocks; vLLM computes its last token once more."""
    w = world(mode="attach", store="offloading")
    w.store.put(w.prompt("bc"))
    w.add(w.prompt("bc", tail=0))
    w.add(w.prompt("bc"))
    w.run()


@OURS
def test_chunks_of_several_blocks(world: Make, mode: str) -> None:
    """A request needs one block and a half of a chunk that is being loaded, and of the next."""
    w = world(mode=mode, store="offloading", chunk=2)
    w.store.put(w.prompt("abcdefgh"))
    requests = [w.add(w.prompt(letters, tail=3)) for letters in ("abcdef", "abcde", "abcdefgh")]
    w.run()
    assert [w.status(r) for r in requests] == ["length"] * 3


def test_simple_alone_loads_for_each(world: Make) -> None:
    w = world(mode="stock", store="simple")
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    for _ in range(4):
        w.add(prompt)
    w.run()
    assert w.gets == 4


class TestKnownBugsOfStock:
    """Shown so that we notice when one is mended."""

    def test_lazy_offloading_copies_in_a_circle(self) -> None:
        from . import campaign
        from .known import NEVER_IDLE

        assert NEVER_IDLE in campaign.run("stock", [15], store="simple", lazy=True).known

    def test_a_second_reset_within_a_step_is_refused(self, world: Make) -> None:
        w = world(mode="stock", store="offloading", hold=True)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        w.add(prompt)
        w.step(2)
        w.reset(connector=True)
        assert not w.reset(connector=True)
        assert "refuses to be reset twice" in w.story()
        w.run()

    def test_a_reset_waits_for_a_load_that_hangs(self, world: Make) -> None:
        """The worker does, in the next step, and the engine with it."""
        w = world(mode="stock", store="offloading")
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        w.hang(w.add(prompt))
        w.step(2)
        w.reset(connector=True)
        w.step()
        assert "rank 0 waits for load 0" in w.story()
        w.run()
