"""Scripted scenarios: what `World` offers, on the layer's main job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]


@pytest.mark.parametrize(("mode", "gets"), [("attach", 1), ("park", 1), ("shadow", 4), ("stock", 4)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_four_requests_for_one_prefix(world: Make, mode: str, gets: int, ranks: int) -> None:
    w = world(mode=mode, blocks=25, ranks=ranks)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    requests = [w.add(prompt, tokens=3) for _ in range(4)]
    w.run()
    assert w.gets == gets
    assert [w.tokens_computed(r) for r in requests] == [2 + 2] * 4
    assert sum(w.tokens_loaded(r) for r in requests) == 16 * gets
    assert w.said(requests[0]) == w.said(requests[3])


def test_held_loads_land_by_name(world: Make) -> None:
    w = world(mode="stock", lanes=2, hold=True)
    prompt = w.prompt("abc")
    w.store.put(prompt)
    first, second = w.add(prompt), w.add(prompt)
    w.step(9)
    assert w.loads == [first, second]
    w.land(second)
    w.step(3)
    assert (w.status(first), w.status(second)) == ("WAITING_FOR_REMOTE_KVS", "length")
    w.run()


def test_a_follower_outlives_its_leader(world: Make) -> None:
    """The leader's client leaves in mid-load: its load is the follower's all the same."""
    w = world(mode="attach", hold=True)
    prompt = w.prompt("abc")
    w.store.put(prompt)
    leader, follower = w.add(prompt), w.add(prompt)
    w.step(2)
    w.abort(leader)
    w.land()
    w.run()
    assert (w.gets, w.status(leader), w.status(follower)) == (1, "abort", "length")
    assert w.tokens_computed(follower) == 1


@pytest.mark.parametrize("recompute", [False, True])
def test_a_broken_key_costs_its_leader_alone(world: Make, recompute: bool) -> None:
    """Under `fail` the leader ends with an error; its follower answers, after a Get of its own at most."""
    w = world(mode="attach", recompute=recompute)
    prompt = w.prompt("abc")
    w.store.put(prompt)
    w.store.fail(prompt, block=1)
    leader = w.add(prompt)
    w.step()
    follower = w.add(prompt, tokens=2)
    w.run()
    assert w.status(leader) == ("length" if recompute else "error")
    assert w.failed_gets[leader] == 1
    assert w.gets <= 2
    if w.failed_gets[follower] == 0 or recompute:
        assert w.status(follower) == "length"


def test_a_hanging_get_ends_the_wait_at_the_deadline(world: Make) -> None:
    w = world(mode="attach", options={"deadline_base_s": 1.0, "deadline_per_token_s": 0.0})
    prompt = w.prompt("abc")
    w.store.put(prompt)
    leader, follower = w.add(prompt), w.add(prompt)
    w.hang(leader)
    w.step(3)
    assert w.status(follower) == "WAITING_FOR_REMOTE_KVS"
    w.advance(1.0)
    w.step(5)
    assert w.status(follower) == "length"
    assert w.tokens_computed(follower) == 13
    assert w.loads == [leader]
    w.run()


def test_tenants_do_not_share(world: Make) -> None:
    w = world(mode="attach")
    prompt = w.prompt("abc")
    w.store.put(prompt, salt="one")
    w.store.put(prompt, salt="two")
    w.add(prompt, salt="one")
    w.add(prompt, salt="two")
    w.run()
    assert w.gets == 2


def test_asked_to_ask_again(world: Make) -> None:
    """Asynchronous lookups, and a pause: nothing is scheduled until it is over."""
    w = world(mode="attach", lookup_async=True, async_scheduling=True, late_forwards=True)
    prompt = w.prompt("abcd")
    w.store.put(prompt)
    w.pause(everything=True)
    request = w.add(prompt, tokens=5)
    w.step(10)
    assert w.tokens_computed(request) == 0
    w.run()
    assert w.tokens_loaded(request) == 16
    assert w.tokens_computed(request) == 1 + 4


@pytest.mark.parametrize("connector", [False, True])
def test_reset_in_mid_load(world: Make, connector: bool) -> None:
    w = world(mode="attach", hold=True)
    prompt = w.prompt("abc")
    w.store.put(prompt)
    requests = [w.add(prompt) for _ in range(2)]
    w.step(2)
    w.reset(connector=connector)
    w.run()
    loaded = sum(w.tokens_loaded(r) for r in requests)
    computed = sum(w.tokens_computed(r) for r in requests)
    # The store is wiped with the connector, and what was in the air is not served.
    assert (loaded, computed) == ((12, 14) if connector else (12, 2))


@pytest.mark.parametrize(
    "kind",
    [
        {"adapter": "red"},
        {"images": {"cat": range(4, 8)}},
        {"embeds": True},
        {"pooling": True},
        {"structured": True},
        {"resumable": True},
    ],
    ids=lambda kind: next(iter(kind)),
)
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_shadow_counts_requests_of_every_kind(world: Make, kind: dict[str, Any], role: str) -> None:
    """Three of a kind load four blocks each, and two of them could have been spared that."""
    w = world(mode="shadow", role=role, v2_runner=True)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt, salt=kind.get("adapter"))
    requests = [w.add(prompt, **kind) for _ in range(3)]
    for request in requests:
        if "structured" in kind:
            w.grammar_ready(request)
        if "resumable" in kind:
            w.close(request)
    w.run()
    assert w.gets == 3
    assert w.loop.connector.shadow.stats.removable == 2 * 4
