"""SingleFlightConnector around the stock Mooncake connector: all by vLLM's calls, nothing by its inside.

Stock reports failed loads by block, keeps its lookups and plans to itself, and asserts that it is told to
load exactly what it has answered. So what passes here needs no more of a connector than its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.simulation.conftest import needs_who_is_chosen

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]

SEEDS = {"attach": 150, "park": 80}
FIRST = pytest.mark.parametrize("asked_first", [False, True], ids=["asked when needed", "asked first"])
MODES = pytest.mark.parametrize("mode", ["attach", "park"])


@pytest.mark.timeout(900)
@FIRST
@MODES
def test_random_stories(mode: str, asked_first: bool) -> None:
    """As of the connector that knows the store's inside; but for bugs of stock that this one does not mend
    (short reads count as complete, an exit ends the receive thread), which these stories leave out."""
    from .known import OF_VLLM
    from .test_seeds import run

    tally: Any = run(mode, SEEDS[mode], wrapped=True, asked_first=asked_first)
    assert set(tally.known) <= set(OF_VLLM)
    assert all(tally.layer[name] for name in ("attached", "ready", "failed", "cut", "cancelled"))
    assert tally.gets > SEEDS[mode]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("other", ["before", "after"])
@MODES
def test_random_stories_beside_another_connector(mode: str, other: str) -> None:
    from .known import OF_VLLM, RESERVED_BY_EACH_OTHER
    from .test_seeds import run

    needs_who_is_chosen(mode, other)
    tally: Any = run(mode, 25, wrapped=True, other=other)
    assert set(tally.known) <= {*OF_VLLM, RESERVED_BY_EACH_OTHER}
    assert tally.layer["ready"] > 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("spec", ["window", "chunked"])
@MODES
def test_random_stories_with_windowed_groups(mode: str, spec: str) -> None:
    from .known import OF_VLLM
    from .test_seeds import run

    tally: Any = run(mode, 40, wrapped=True, spec=spec)
    assert set(tally.known) <= set(OF_VLLM)
    assert tally.layer["ready"] > 3


def test_a_suffix_that_is_shorter_than_it_was_said_to_be_needs_other_windows(world: Make) -> None:
    """The store lacks block 2 of a windowed group. A hit of 4 blocks does not need it, one of 3 does, so the
    second request's ends after 2 and stands on block 1 of all groups. The first load has not brought that
    block of the windowed ones: it must not be adopted."""
    w = world(mode="attach", wrapped=True, spec="window", window=2)
    prompt = w.prompt("abcd", tail=1)
    w.store.put(prompt)
    w.store.evict(prompt, 2, group=2)
    first = w.add(prompt)
    second = w.add(prompt[:-1])
    w.run()
    assert {w.status(r) for r in (first, second)} == {"length"}
    assert w.gets == 2
    assert w.tokens_computed(second) == 2 * w.setup.block_size


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_where_no_layer_is_on_it_is_the_stock_connector(world: Make, mode: str) -> None:
    w = world(mode=mode, wrapped=True)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    requests = [w.add(prompt, tokens=3) for _ in range(4)]
    w.run()
    assert w.gets == 4
    assert {w.status(r) for r in requests} == {"length"}
    if mode == "shadow":
        assert w.loop.connector.shadow.stats.removable == 3 * 4


@FIRST
@MODES
def test_four_requests_for_one_prefix(world: Make, mode: str, asked_first: bool) -> None:
    w = world(mode=mode, wrapped=True, asked_first=asked_first)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    requests = [w.add(prompt, tokens=3) for _ in range(4)]
    w.run()
    assert w.gets == 1
    assert [w.tokens_computed(r) for r in requests] == [2 + 2] * 4


def questions(w: World) -> list[tuple[str, str, int]]:
    """(what, request, tokens) as the child hears it from here on."""
    heard: list[tuple[str, str, int]] = []
    child = w.loop.connector.child
    ask, tell = child.get_num_new_matched_tokens, child.update_state_after_alloc

    def asked(request: Any, num_computed_tokens: int) -> Any:
        heard.append(("asked", request.request_id, num_computed_tokens))
        return ask(request, num_computed_tokens)

    def told(request: Any, blocks: Any, num_external_tokens: int) -> None:
        heard.append(("told", request.request_id, num_external_tokens))
        tell(request, blocks, num_external_tokens)

    child.get_num_new_matched_tokens, child.update_state_after_alloc = asked, told
    return heard


def test_a_longer_prompt_is_asked_for_behind_what_is_adopted(world: Make) -> None:
    w = world(mode="attach", wrapped=True, hold=True)
    w.store.put(w.prompt("abcdef"))
    w.add(w.prompt("abc"))
    w.step()
    heard = questions(w)
    longer = w.add(w.prompt("abcdef"))
    w.step()
    assert heard == [("asked", longer, 12), ("told", longer, 12)]
    w.run()
    assert w.tokens_loaded(longer) == 12


def test_who_adopts_all_is_asked_about_first_where_the_child_wants_it(world: Make) -> None:
    """LMCache's asserts that it has been asked about whoever it hears of."""
    w = world(mode="attach", wrapped=True, asked_first=True, hold=True)
    w.store.put(w.prompt("abc"))
    w.add(w.prompt("abc"))
    w.step()
    heard = questions(w)
    follower = w.add(w.prompt("abc"))
    w.step()
    assert heard == [("asked", follower, 12), ("told", follower, 0)]
    w.run()


@MODES
def test_nobody_is_heard_of_unasked(world: Make, mode: str) -> None:
    """Whatever the layer decides: to wait, to adopt, to compute after a deadline, to start again."""
    options = {"deadline_base_s": 0.2, "deadline_per_token_s": 0.0, "on_deadline": "recompute"}
    w = world(mode=mode, wrapped=True, asked_first=True, options=options)
    heard = questions(w)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    leader = w.add(prompt)
    w.hang(leader)
    w.step(2)
    others = [w.add(prompt), w.add(prompt, read_cache=False)]
    w.step(3)
    w.advance(1.0)
    w.step(8)
    assert [w.status(r) for r in others] == ["length"] * 2
    w.run()
    known: set[str] = set()
    for what, request, _ in heard:
        known |= {request} if what == "asked" else set()
        assert request in known


def test_a_child_that_waits_for_whoever_loads_the_same_key_has_nothing_to_wait_for(world: Make) -> None:
    """OffloadingConnector answers "ask again" while any block that it is asked for is on its way to another
    request: alone, a request that shares a prefix waits for that load, and those behind it for its own. Here
    it is asked only for what is behind the prefix, and loads that at once."""
    w = world(mode="attach", wrapped=True, hold=True)
    child = w.loop.connector.child
    ask, tell = child.get_num_new_matched_tokens, child.update_state_after_alloc
    in_air: set[bytes] = set()

    def asked(request: Any, num_computed_tokens: int) -> Any:
        answer, is_async = ask(request, num_computed_tokens)
        wanted = request.block_hashes[num_computed_tokens // 4 : (num_computed_tokens + answer) // 4]
        return (None, False) if in_air.intersection(map(bytes, wanted)) else (answer, is_async)

    def told(request: Any, blocks: Any, num_external_tokens: int) -> None:
        tell(request, blocks, num_external_tokens)
        if num_external_tokens:
            spec = child.connector_scheduler.load_specs[request.request_id]
            loaded = request.block_hashes[spec.vllm_cached_tokens // 4 : spec.kvpool_cached_tokens // 4]
            in_air.update(map(bytes, loaded))

    child.get_num_new_matched_tokens, child.update_state_after_alloc = asked, told
    w.store.put(w.prompt("abcdef"))
    w.store.put(w.prompt("abcxyz"))
    requests = [w.add(w.prompt(letters)) for letters in ("abcdef", "abcdef", "abcxyz")]
    w.step(2)
    assert w.loads == [requests[0], requests[2]], "the last one's suffix is not behind the others' loads"
    assert {w.status(r) for r in requests} == {"WAITING_FOR_REMOTE_KVS"}
    w.run()
    assert w.gets == 2


@MODES
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_before_the_bad_one_land(world: Make, mode: str, recompute: bool) -> None:
    """The child says which block has failed, not whose load: only that load has failed, from there on."""
    w = world(mode=mode, wrapped=True, recompute=recompute, hold=True)
    prompt = w.prompt("abcdef")
    w.store.put(prompt)
    w.store.fail(prompt, block=3)
    leader = w.add(prompt)
    w.step()
    needs_two = w.add(w.prompt("ab"))
    w.step(2)
    w.run()
    assert w.status(leader) == ("length" if recompute else "error")
    assert w.status(needs_two) == "length"
    assert w.tokens_computed(needs_two) == 1, "what it needs was there"
    # Under policy "fail" the leader is gone, and in park mode its blocks with it.
    assert w.gets == (2 if mode == "park" and not recompute else 1)
    if recompute:
        assert w.tokens_computed(leader) == 3 * 4 + 1


@MODES
def test_a_child_that_saves_and_loads_for_one_request_is_heard_of_once(world: Make, mode: str) -> None:
    """A client leaves in mid-load. LMCache's connector then reports that its request has been sent as well as
    that it has been received, and vLLM would end at the second."""
    w = world(mode=mode, wrapped=True, hold=True)
    child, (worker,) = w.loop.connector.child, w.loop._connectors
    child.request_finished_all_groups = lambda request, block_ids: (True, None)
    results = worker.child.get_transfer_results

    def reported(finished: set[str]) -> Any:
        found = results(finished)
        found.finished_sending = set(finished)
        return found

    worker.child.get_transfer_results = reported
    prompt = w.prompt("abcd")
    w.store.put(prompt)
    leader, follower = w.add(prompt), w.add(prompt)
    w.step(2)
    w.abort(leader)
    w.abort(follower)
    w.step(3)
    w.land()
    w.run()
    assert {w.status(r) for r in (leader, follower)} == {"abort"}
