"""What a request can be besides a plain prompt, and who shares whose load then.

Block hashes tell requests apart: they cover adapter, image and embeddings. All here runs with both schedulers
and in both modes; `World` checks each slot read, all tokens and all free blocks.
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


def test_an_adapters_requests_share_with_each_other_only(like: Make) -> None:
    """LoRA: the same tokens under two adapters and under none are three loads."""
    w = like(blocks=40)
    prompt = w.prompt("abcd", tail=2)
    for adapter in ("red", "blue", None):
        w.store.put(prompt, salt=adapter)
    requests = [w.add(prompt, adapter=adapter, tokens=3) for adapter in ("red", "blue", None) * 3]
    w.run()
    assert w.gets == 3
    assert [w.tokens_computed(r) for r in requests] == [2 + 2] * 9


def test_who_has_landed_waits_for_room_among_the_adapters(like: Make) -> None:
    """max_loras 1: followers of a landed load wait for the other adapter's request to end, as in stock."""
    w = like(blocks=40)
    w.scheduler.lora_config = type("LoRAConfig", (), {"max_loras": 1})
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt, salt="red")
    running = w.add(w.prompt("xy"), adapter="blue", tokens=12)
    w.step(2)
    red = [w.add(prompt, adapter="red", tokens=2) for _ in range(3)]
    w.run()
    assert w.gets == 1
    assert [w.status(r) for r in (running, *red)] == ["length"] * 4


def test_a_picture_is_shared_with_who_shows_the_same(like: Make) -> None:
    """Multimodal: prompts that differ only in the picture behind the placeholders. Its blocks come from the
    store, so no encoder runs for it."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    w = like(blocks=40)
    w.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=100)
    w.scheduler.max_num_encoder_input_tokens = 100
    cat = w.prompt("abcd", tail=2)
    dog = [*cat[:4], *range(7000, 7008), *cat[12:]]
    where = range(4, 12)
    w.store.put(cat)
    w.store.put(dog)
    requests = [w.add(cat, images={"cat": where}, tokens=2) for _ in range(3)]
    requests += [w.add(dog, images={"dog": where}, tokens=2) for _ in range(3)]
    w.run()
    assert w.gets == 2
    assert [w.tokens_computed(r) for r in requests] == [2 + 1] * 6
    assert len({tuple(w.said(r)) for r in requests}) == 2
    assert w.scheduler.encoder_cache_manager.num_free_slots == 100


def test_prompts_given_as_embeddings_share_by_their_embeddings(like: Make) -> None:
    """`prompt_embeds`, with model runner v2. With v1 the stock connector ends the engine: test_known.py."""
    w = like(blocks=40, v2_runner=True)
    one, other = w.prompt("abcd", tail=2), w.prompt("abce", tail=2)
    w.store.put(one)
    w.store.put(other)
    requests = [w.add(prompt, embeds=True, tokens=2) for prompt in (one, one, other, one)]
    w.run()
    # Three blocks are common: whoever asks for `other` loads its last one.
    assert w.gets == 2
    assert [w.tokens_computed(r) for r in requests] == [2 + 1] * 4
    assert sum(w.tokens_loaded(r) for r in requests) == 16 + 4


def test_pooling_requests_share_a_load(like: Make) -> None:
    """They end with their prompt."""
    w = like(blocks=40)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    requests = [w.add(prompt, pooling=True) for _ in range(4)]
    w.run()
    assert w.gets == 1
    assert [w.status(r) for r in requests] == ["stop"] * 4
    assert [w.tokens_computed(r) for r in requests] == [2] * 4


def test_who_waits_for_its_grammar_joins_once_that_is_there(like: Make) -> None:
    """Structured output: vLLM asks nobody before the grammar is compiled; then the request follows like any
    other, or leads."""
    w = like(hold=True, blocks=40)
    prompt, own = w.prompt("abcd", tail=2), w.prompt("efgh", tail=2)
    w.store.put(prompt)
    w.store.put(own)
    waits = w.add(prompt, structured=True, tokens=3)
    leads = w.add(own, structured=True, tokens=3)
    w.step(2)
    assert not w.loads
    leader = w.add(prompt, tokens=3)
    w.step(2)
    w.grammar_ready(waits)
    w.grammar_ready(leads)
    w.step(2)
    assert w.loads == [leader, leads]
    follows = w.add(own, tokens=3)
    w.run()
    assert w.gets == 2
    assert [w.tokens_computed(r) for r in (waits, leads, leader, follows)] == [2 + 2] * 4


@pytest.mark.parametrize("role", ["kv_producer", "kv_both", "kv_consumer"])
@pytest.mark.parametrize("save_decode", [False, True], ids=["", "save_decode_cache"])
def test_every_role_shares_loads_and_saves_what_it_would_alone(
    like: Make, world: Make, role: str, save_decode: bool, async_scheduling: bool
) -> None:
    """A producer loads, too. A consumer saves nothing, or only what it decodes (`save_decode_cache`). At the
    end the store has the very keys that stock leaves."""
    ends = []
    for w in (
        like(role=role, save_decode=save_decode, blocks=40),
        world(mode="stock", role=role, save_decode=save_decode, blocks=40, async_scheduling=async_scheduling),
    ):
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        requests = [w.add([*prompt, *w.prompt(chr(ord("k") + i))], tokens=10) for i in range(3)]
        w.run()
        assert [w.tokens_computed(r) for r in requests] == [1 + 4 + 1 + 9] * 3
        assert w.gets == (1 if w.setup.mode != "stock" else 3)
        ends.append(set(w.loop.store.held))
    assert ends[0] == ends[1]
    saved = len(ends[0]) - 4
    assert (saved > 0) == (role != "kv_consumer" or save_decode)
