"""Load or compute in vLLM's real scheduler: bursts over links of several rates, in virtual time.

A prompt of 32 blocks takes one second to compute, and `1 / ratio` to load over one receive thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]

BLOCKS, BURST = 32, 16
both_modes = pytest.mark.parametrize("mode", ["attach", "park"])


@pytest.fixture
def mode() -> str:
    """Where a test does not say."""
    return "attach"


@pytest.fixture
def engine(world: Make, mode: str) -> Make:
    def make(ratio: float = 1.0, **fields: object) -> World:
        plain = {
            "mode": mode,
            "load_or_compute": "on",
            "blocks": BLOCKS * 48,
            "token_budget": 8 * BLOCKS,
            "max_seqs": 64,
            "step_s": 0.02,
            "token_s": 1 / (4 * BLOCKS),
            "load_s": 0.0,
            "load_block_s": 1 / ratio / BLOCKS,
            # Eight of 256 tokens.
            "options": {"compute_decode_share": 8 / 256},
        }
        return world(**plain | fields)

    return make


def prompts(w: World, count: int, first: int) -> list[list[int]]:
    """Prompts that share nothing."""
    letters = range(0x4E00 + first * BLOCKS, 0x4E00 + (first + count) * BLOCKS, BLOCKS)
    return [w.prompt("".join(map(chr, range(letter, letter + BLOCKS)))) for letter in letters]


def until_told(w: World, requests: list[str]) -> list[float]:
    """Seconds to the first token of each."""
    began, told = w.now, {}
    while len(told) < len(requests):
        w.step()
        told |= {r: w.now - began for r in requests if w.said(r) and r not in told}
    return [told[r] for r in requests]


def learns(w: World) -> None:
    """Prompts that nobody has stored, one after the other; then a queue of loads."""
    for prompt in prompts(w, 6, 100):
        until_told(w, [w.add(prompt)])
    stored = prompts(w, 6, 200)
    for prompt in stored:
        w.store.put(prompt)
    until_told(w, [w.add(prompt) for prompt in stored])


def burst(w: World, **more: int) -> tuple[list[float], int]:
    """Prompts that are all in the store and share nothing: first tokens, and how many have loaded."""
    stored = prompts(w, BURST, 300)
    for prompt in stored:
        w.store.put(prompt)
    requests = [w.add(prompt, **more) for prompt in stored]
    told = until_told(w, requests)
    return told, sum(w.tokens_loaded(r) > 0 for r in requests)


def both_at_once(ratio: float) -> float:
    """The mean of first tokens if link and accelerator each serve one request after the other."""
    ends = sorted([(i + 1) / ratio for i in range(BURST)] + [float(i + 1) for i in range(BURST)])[:BURST]
    return sum(ends) / BURST


@both_modes
@pytest.mark.parametrize(("ratio", "computed"), [(1, range(5, 9)), (3, range(2, 5)), (10, range(2))])
def test_a_burst_over_a_slow_link_is_spread_over_both_machines(
    engine: Make, ratio: float, computed: range
) -> None:
    """Not more than 1.25 times what both could do, and no later than with the link alone."""
    w, stock = engine(ratio), engine(ratio, mode="stock", load_or_compute="off")
    learns(w)
    told, loaded = burst(w)
    alone, _ = burst(stock)
    assert BURST - loaded in computed
    assert sum(told) / BURST <= 1.25 * both_at_once(ratio)
    assert max(told) <= max(alone) + 0.1
    w.run()
    assert w.layer_counters()["chose_compute"] == BURST - loaded


@both_modes
def test_over_a_wide_link_all_load(engine: Make) -> None:
    w = engine(100)
    learns(w)
    assert burst(w)[1] == BURST
    w.run()
    assert w.layer_counters()["chose_compute"] == 0


@both_modes
def test_until_it_has_learned_all_load(engine: Make) -> None:
    w = engine(1)
    assert burst(w)[1] == BURST
    w.run()


@both_modes
def test_beside_many_decodes_all_load(engine: Make) -> None:
    w = engine(1)
    learns(w)
    decoding = [w.add(prompt[-9:], tokens=400) for prompt in prompts(w, 9, 400)]
    until_told(w, decoding)
    assert burst(w)[1] == BURST
    assert {w.status(r) for r in decoding} == {"RUNNING"}
    for request in decoding:
        w.abort(request)
    w.run()


@both_modes
def test_those_who_share_a_prefix_load_it_once_behind_a_queue(engine: Make, mode: str) -> None:
    """Half of a burst shares a prefix whose load is in the air: they wait for it, whatever is queued."""
    w = engine(1)
    learns(w)
    shared, *others = prompts(w, 7, 300)
    for prompt in (shared, *others):
        w.store.put(prompt)
    sharing = [w.add(shared) for _ in range(8)]
    until_told(w, sharing + [w.add(prompt) for prompt in others])
    assert [w.tokens_loaded(r) > 0 for r in sharing] == [True] + [False] * 7
    assert sum(w.tokens_computed(r) for r in sharing) < 2 * len(shared)
    w.run()
    assert w.layer_counters()["chose_join"] == 7


@both_modes
def test_what_one_computes_others_find(engine: Make) -> None:
    """The last of a burst computes; who comes for its prefix then does not load it either."""
    w = engine(1)
    learns(w)
    *busy, wanted = prompts(w, 6, 300)
    for prompt in (*busy, wanted):
        w.store.put(prompt)
    for prompt in busy:
        w.add(prompt)
    pair = [w.add(wanted)]
    while not w.tokens_computed(pair[0]):
        w.step()
    pair.append(w.add(wanted))
    until_told(w, pair)
    assert [w.tokens_loaded(r) for r in pair] == [0, 0]
    assert sum(w.tokens_computed(r) for r in pair) < 1.2 * len(wanted)
    w.run()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_shadow_mode_counts_what_would_have_been_chosen_and_changes_nothing(
    engine: Make, async_scheduling: bool
) -> None:
    w = engine(1, mode="shadow", async_scheduling=async_scheduling, warm=True)
    told, loaded = burst(w)
    stock, _ = burst(engine(1, mode="stock", load_or_compute="off", async_scheduling=async_scheduling))
    assert loaded == BURST
    assert told == stock
    w.run()
    counted = w.loop.connector.shadow.stats
    assert counted.chose_load + counted.chose_compute == BURST
    assert counted.chose_compute > 0
