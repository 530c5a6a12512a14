"""Cases that can be worked out by hand, on the specification and on the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from singleflight.core.policy import Policy
from singleflight.twin import kernel, model
from singleflight.twin.outcome import Outcome
from singleflight.twin.pool import Pool
from tests.twin.cases import BLOCK, FREE, IDLE_S, NOTICED_S, ROOMY, STEP_S, burst, prompts

Simulate = Callable[..., Outcome]
SLOW = FREE.given(load_latency=0.1, load_bandwidth=1000.0)
"""A load of 10 blocks takes 0.1 s until its first byte, and 0.1 s from there."""


@pytest.fixture(params=[model.simulate, kernel.simulate], ids=["model", "kernel"])
def simulate(request: pytest.FixtureRequest) -> Simulate:
    return request.param  # type: ignore[no-any-return]


def noticed(seconds: float, ends: int = 1) -> object:
    """At the end of so many loads one after the other, each as an idle engine notices it."""
    late = ends * NOTICED_S
    return pytest.approx(seconds + late / 2, abs=late / 2 + 1e-9)


def test_a_burst_of_two_over_one_thread_loads_twice_in_stock_and_once_in_attach(simulate: Simulate) -> None:
    arrivals = prompts(burst(2, 10))
    stock, attach, park = (simulate(arrivals, SLOW, ROOMY, mode) for mode in ("stock", "attach", "park"))
    assert stock.gets.started_s.tolist() == pytest.approx([0.0, 0.2])
    assert stock.gets.ended_s.tolist() == pytest.approx([0.2, 0.4])
    assert stock.ttft_s.tolist() == [noticed(0.2), noticed(0.4)]
    assert stock.removable_blocks.tolist() == [0, 10]
    assert stock.bytes == 200
    for shared in (attach, park):
        assert shared.gets.ended_s.tolist() == pytest.approx([0.2])
        assert shared.ttft_s.tolist() == [noticed(0.2), noticed(0.2)]
        assert shared.bytes == 100
    assert attach.adopted_blocks.tolist() == [0, 10]
    assert park.local_blocks.tolist() == [0, 10]


def test_a_followers_own_suffix_is_queued_at_once_in_attach_and_after_the_wait_in_park(
    simulate: Simulate,
) -> None:
    arrivals = prompts(burst(2, 10, own=5))
    instance = replace(ROOMY, receive_threads=2, policy=Policy(join_patience=0))
    attach, park = (simulate(arrivals, SLOW, instance, mode) for mode in ("attach", "park"))
    assert attach.gets.blocks.tolist() == park.gets.blocks.tolist() == [15, 5]
    assert attach.gets.queued_s.tolist() == [0.0, 0.0]
    assert park.gets.queued_s[1] >= park.gets.reported_s[0]
    # Both share the link: 5 blocks each by 0.2, the other 10 alone by 0.3.
    assert attach.gets.ended_s.tolist() == pytest.approx([0.3, 0.2])
    # The suffix is there, and waits for what it stands on.
    assert attach.ttft_s.tolist() == [noticed(0.3), noticed(0.3)]
    assert park.ttft_s.tolist() == [noticed(0.25), noticed(0.4, ends=2)]


def test_transfers_share_the_link_evenly(simulate: Simulate) -> None:
    arrivals = prompts([(0.0, range(10)), (0.0, range(20, 25))])
    two = replace(ROOMY, receive_threads=2)
    shared = simulate(arrivals, SLOW, two, "stock")
    assert shared.gets.ended_s.tolist() == pytest.approx([0.25, 0.2])
    # A link that is twice as wide as one Get is fast: each as if it were alone.
    apart = simulate(arrivals, SLOW.given(parallel_loads=2.0), two, "stock")
    assert apart.gets.ended_s.tolist() == pytest.approx([0.2, 0.15])


def test_latencies_overlap_where_threads_are_idle(simulate: Simulate) -> None:
    arrivals = prompts([(0.0, [name]) for name in range(4)])
    far = FREE.given(load_latency=0.3)
    for threads, waves in ((1, 4), (2, 2), (4, 1)):
        outcome = simulate(arrivals, far, replace(ROOMY, receive_threads=threads), "stock")
        assert outcome.ttft_s.max() == noticed(waves * 0.3)


def test_who_finds_no_seat_is_not_even_looked_up(simulate: Simulate) -> None:
    """The first decodes for 49 steps of 10 ms after its first token; only then the second is looked up."""
    arrivals = prompts([(0.0, []), (0.0, range(10))], output=50)
    figures = SLOW.given(step_overhead=0.01)
    one, two = (simulate(arrivals, figures, replace(ROOMY, max_num_seqs=seats), "stock") for seats in (1, 2))
    assert one.ttft_s[0] == two.ttft_s[0] == pytest.approx(0.01)
    assert one.gets.queued_s.tolist() == pytest.approx([0.5])
    assert two.gets.queued_s.tolist() == [0.0]
    assert one.ttft_s[1] == pytest.approx(0.5 + 0.2 + 0.01, abs=2 * IDLE_S)


def test_a_long_prompt_is_computed_in_chunks_that_leave_room_for_who_decodes(simulate: Simulate) -> None:
    """A budget of 100: the first step computes 21 tokens and 79 of 250; the others one token and 99."""
    arrivals = prompts([(0.0, [0, 1]), (0.0, range(10, 34))], tail=1, output=9)
    cold = replace(ROOMY, store="computed", max_num_batched_tokens=100, max_num_seqs=8)
    outcome = simulate(arrivals, FREE.given(step_overhead=0.01), cold, "stock")
    assert outcome.ttft_s.tolist() == pytest.approx([0.01, 0.03])
    assert outcome.computed_tokens.tolist() == [21, 241]
    assert outcome.steps == 11


def test_a_step_costs_what_is_computed_in_it(simulate: Simulate) -> None:
    """20 tokens at 1,000 a second and 210 pairs; then 4 steps with contexts of 21 to 24."""
    figures = FREE.given(
        step_overhead=0.01, prefill_rate=1000.0, attention=1e-4, decode_per_request=0.001, decode_context=1e-4
    )
    arrivals = prompts([(0.0, [1]), (0.5, [1])], tail=10 - 0, output=5)
    cold = replace(ROOMY, store="computed")
    outcome = simulate(arrivals, figures, cold, "stock")
    assert outcome.ttft_s[0] == pytest.approx(0.01 + 20 / 1000 + 210e-4)
    # The second finds the first block: 10 tokens, and pairs with those before.
    assert outcome.local_blocks.tolist() == [0, 1]
    assert outcome.ttft_s[1] == pytest.approx(0.01 + 10 / 1000 + (10 * 10 + 55) * 1e-4)
    assert outcome.steps == 10


def test_a_short_rest_of_a_long_prompt_pays_for_the_context_that_it_reads(simulate: Simulate) -> None:
    """The second finds two blocks, 20 tokens, and computes 5 more."""
    figures = FREE.given(prefill_context=0.01)
    arrivals = prompts([(0.0, [1, 2]), (0.5, [1, 2])], tail=5)
    outcome = simulate(arrivals, figures, replace(ROOMY, store="computed"), "stock")
    assert outcome.local_blocks.tolist() == [0, 2]
    assert outcome.ttft_s.tolist() == pytest.approx([0.0, 2 * BLOCK * 0.01], abs=2 * STEP_S)


def test_a_step_is_slower_while_bytes_come_in_but_not_while_a_get_waits_for_them(simulate: Simulate) -> None:
    """The first loads for 1 s after 1 s of latency; the others compute before that, meanwhile and after."""
    figures = FREE.given(
        load_latency=1.0, load_bandwidth=float(BLOCK), step_overhead=0.01, loading_slowdown=3.0
    )
    arrivals = prompts([(0.0, [1]), (0.5, []), (1.5, []), (3.0, [])], tail=5)
    outcome = simulate(arrivals, figures, ROOMY, "stock")
    assert outcome.ttft_s[1:].tolist() == pytest.approx([0.01, 0.03, 0.01], abs=2 * IDLE_S)


def test_a_load_that_comes_in_while_a_step_computes_takes_longer_by_then(simulate: Simulate) -> None:
    """It would take 1 s. A step of 0.4 s begins when half of it is there, and brings a tenth of it."""
    figures = FREE.given(load_bandwidth=float(BLOCK), step_overhead=0.4, computing_slowdown=4.0)
    arrivals = prompts([(0.0, [1]), (0.5, [])], tail=5)
    outcome = simulate(arrivals, figures, ROOMY, "stock")
    assert outcome.gets.ended_s.tolist() == pytest.approx([1.3], abs=4 * IDLE_S)


@pytest.mark.parametrize("again", [1.0, 0.25])
def test_a_further_lookup_of_a_step_may_be_cheaper_than_the_first(simulate: Simulate, again: float) -> None:
    figures = FREE.given(lookup_latency=0.2, lookup_again=again)
    arrivals = prompts([(0.0, [1]), (0.0, [2]), (5.0, [3])])
    outcome = simulate(arrivals, figures, ROOMY, "stock")
    assert outcome.gets.queued_s.tolist() == pytest.approx(
        [0.2 * (1 + again), 0.2 * (1 + again), 5.2], abs=4 * STEP_S
    )


@pytest.mark.parametrize(("synchronous", "starts"), [(False, 0.0), (True, 0.2)])
def test_a_load_starts_with_its_step_or_where_launches_are_synchronous_at_its_end(
    simulate: Simulate, synchronous: bool, starts: float
) -> None:
    arrivals = prompts([(0.0, []), (0.0, [1])], tail=5)
    instance = replace(ROOMY, synchronous_launch=synchronous)
    outcome = simulate(arrivals, FREE.given(step_overhead=0.2), instance, "stock")
    assert outcome.gets.started_s.tolist() == pytest.approx([starts])


def test_loads_in_each_others_way_take_longer_together_than_in_turn(simulate: Simulate) -> None:
    """One alone takes 1 s; two at once bring half as many bytes a second as one, and take 4 s."""
    figures = FREE.given(load_bandwidth=float(BLOCK), parallel_loads=0.5)
    two = replace(ROOMY, receive_threads=2)
    alone = simulate(prompts([(0.0, [1])]), figures, two, "stock")
    together = simulate(prompts([(0.0, [1]), (0.0, [2])]), figures, two, "stock")
    assert (alone.gets.ended_s - alone.gets.started_s).tolist() == pytest.approx([1.0])
    assert (together.gets.ended_s - together.gets.started_s).tolist() == pytest.approx([4.0, 4.0])


def test_the_front_end_takes_one_request_after_another(simulate: Simulate) -> None:
    figures = FREE.given(frontend_per_request=0.1, frontend_per_token=0.01)
    outcome = simulate(prompts([(0.0, []), (0.0, []), (5.0, [])], tail=5), figures, ROOMY, "stock")
    assert outcome.ttft_s.tolist() == pytest.approx([0.15, 0.3, 0.15], abs=2 * STEP_S)


def test_an_engine_that_takes_requests_itself_takes_all_that_are_due_before_a_step(
    simulate: Simulate,
) -> None:
    """Two at 0 s are taken for 0.1 s each, then a step; the third, due meanwhile, waits for the next."""
    figures = FREE.given(frontend_per_request=0.1, step_overhead=0.5)
    arrivals = prompts([(0.0, []), (0.0, []), (0.15, [])], tail=5)
    outcome = simulate(arrivals, figures, replace(ROOMY, in_process=True), "stock")
    assert outcome.ttft_s.tolist() == pytest.approx([0.7, 0.7, 1.15])


@pytest.mark.parametrize(("asynchronous", "first"), [(False, 0.6), (True, 0.2)])
def test_a_synchronous_lookup_holds_up_everybody_and_an_asynchronous_one_its_own_request(
    simulate: Simulate, asynchronous: bool, first: float
) -> None:
    """Two of 0.2 s before a step of 0.2 s in which nothing but the first request computes."""
    arrivals = prompts([(0.0, []), (0.0, [1]), (0.0, [2])])
    figures = FREE.given(lookup_latency=0.2, step_overhead=0.2)
    instance = replace(ROOMY, lookup_async=asynchronous)
    outcome = simulate(arrivals, figures, instance, "stock")
    assert outcome.ttft_s[0] == pytest.approx(first)
    assert outcome.lookups.tolist() == [0, 1, 1]
    # One thread asks: the third's answer takes 0.4 s.
    assert outcome.gets.queued_s[1] >= 0.4


def test_the_store_has_what_was_computed_before_and_a_warm_one_everything(simulate: Simulate) -> None:
    """The third request finds the first one's blocks evicted by the second, and loads them."""
    arrivals = prompts([(0.0, range(10)), (1.0, range(20, 40)), (2.0, range(10))])
    small = replace(ROOMY, gpu_blocks=21)
    cold = simulate(arrivals, FREE, replace(small, store="computed"), "stock")
    assert cold.loaded_blocks.tolist() == [0, 0, 10]
    warm = simulate(arrivals, FREE, small, "stock")
    assert warm.loaded_blocks.tolist() == [10, 20, 10]
    # Another instance has put the second's blocks there just in time.
    others = replace(arrivals, stored_from=np.where(np.arange(33) // 10 >= 1, 1.0, np.inf))
    assert simulate(others, FREE, replace(small, store="computed"), "stock").loaded_blocks[1] == 20


def test_who_computes_together_computes_a_shared_prefix_once(simulate: Simulate) -> None:
    """As in vLLM: whoever is admitted in the same pass hits the blocks that the first will have computed."""
    outcome = simulate(prompts(burst(3, 10)), FREE, replace(ROOMY, store="computed"), "stock")
    assert outcome.computed_tokens.tolist() == [101, 1, 1]
    assert outcome.n_gets == 0


def test_a_follower_whose_deadline_passes_computes_for_itself(simulate: Simulate) -> None:
    arrivals = prompts([(0.0, range(10)), (0.05, range(10))])
    policy = Policy(deadline_base_s=0.1, deadline_per_block_s=0.0)
    for mode in ("attach", "park"):
        outcome = simulate(arrivals, SLOW, replace(ROOMY, policy=policy), mode)
        assert outcome.ttft_s[1] == noticed(0.1)
        assert outcome.ttft_s[0] == noticed(0.2)
        assert outcome.computed_tokens.tolist() == [1, 101]
        assert outcome.n_gets == 1
        load = simulate(arrivals, SLOW, replace(ROOMY, policy=policy, on_deadline="load"), mode)
        # At 0.15 s it queues behind the first, which ends at 0.2 s.
        assert load.ttft_s[1] == noticed(0.4 - 0.05)
        assert load.loaded_blocks.tolist() == [10, 10]


def test_loads_are_admitted_only_if_those_before_them_can_finish(simulate: Simulate) -> None:
    """10 blocks each, and 2 to come: in 22 both loads fit beside the first one's 2; in 21 they do not."""
    arrivals = prompts([(0.0, range(10)), (0.0, range(20, 30))], tail=1, output=20)
    one_by_one = simulate(arrivals, SLOW, replace(ROOMY, gpu_blocks=21), "stock")
    assert one_by_one.gets.queued_s[1] >= one_by_one.ttft_s[0]
    together = simulate(arrivals, SLOW, replace(ROOMY, gpu_blocks=22), "stock")
    assert together.gets.queued_s.tolist() == [0.0, 0.0]


def test_a_request_that_cannot_fit_is_refused_by_its_number(simulate: Simulate) -> None:
    arrivals = prompts([(0.0, [1]), (0.0, range(10))])
    with pytest.raises(
        ValueError, match=r"request 1 needs 11 blocks of KV cache; accepted: up to gpu_blocks \(10\)"
    ):
        simulate(arrivals, FREE, replace(ROOMY, gpu_blocks=10), "stock")


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = Pool(6)
    first, second = pool.take(3), pool.take(3)
    for blocks, names in ((first, [1, 2, 3]), (second, [4, 5, 6])):
        for block, name in zip(blocks, names, strict=True):
            pool.cache(block, name)
    pool.give_back(first)
    pool.give_back(second)
    pool.take(4)
    assert len(pool.hit([1, 2, 3], 3)) == 0
    assert len(pool.hit([4, 5, 6], 3)) == 2


def test_of_two_copies_of_a_block_one_is_left_when_the_other_is_evicted() -> None:
    pool = Pool(3)
    copies = pool.take(2)
    for block in copies:
        pool.cache(block, 7)
    pool.give_back(copies[:1])
    assert pool.take(2)
    assert pool.find(7) == copies[1]


TAILS = (0, 1)


@pytest.mark.parametrize("mode", ["attach", "park"])
def test_bursts_over_loads_of_8_ms_save_nothing_with_or_without_a_tail(mode: str) -> None:
    """200 bursts of 16 prompts over 400 shared blocks, loads of 8 ms that run in parallel: the window model
    says no without a tail, and yes with one unshared block a prompt. But a follower waits as long as its own
    load would take."""
    figures = FREE.given(load_latency=0.008, step_overhead=0.01, prefill_rate=10_000.0)
    instance = replace(ROOMY, receive_threads=16, store="computed", max_num_batched_tokens=8192)
    savings = []
    for own in TAILS:
        rows = [
            row for i in range(200) for row in burst(16, 400, own, at=float(i), first=i * (400 + 16 * own))
        ]
        arrivals = prompts(rows)
        shared = np.zeros(len(arrivals.stored_from), bool)
        for at, _ in rows[::16]:
            shared[arrivals.blocks[arrivals.offsets[int(at) * 16] :][:400]] = True
        arrivals = replace(arrivals, stored_from=np.where(shared, 0.0, np.inf))
        stock, ours = (kernel.simulate(arrivals, figures, instance, each) for each in ("stock", mode))
        assert stock.removable_blocks.sum() == 200 * 15 * 400
        savings.append(1 - ours.ttft_s.mean() / stock.ttft_s.mean())
    assert savings == pytest.approx([0, 0], abs=0.02)


def test_the_same_bursts_over_one_thread_save_the_queue() -> None:
    """With vLLM's one receive thread the sixteenth waits for 16 loads."""
    arrivals = prompts(burst(16, 400))
    figures = FREE.given(load_latency=0.008)
    stock, attach = (kernel.simulate(arrivals, figures, ROOMY, mode) for mode in ("stock", "attach"))
    assert stock.ttft_s.mean() == pytest.approx(0.008 * 8.5, abs=NOTICED_S)
    assert attach.ttft_s.tolist() == [noticed(0.008)] * 16
