"""Load or compute: what a load behind a queue is expected to take, what a prefill, and who does which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singleflight.core.choice import Chosen, Expected
from singleflight.core.fit import ENOUGH, OUTLIER, Plane
from singleflight.core.policy import Policy
from singleflight.core.prefill import REACH, PrefillSpeed, Work
from singleflight.core.receive import ReceiveQueue

BUDGET = 8192


class TestPlane:
    @given(
        st.lists(st.tuples(st.integers(50, 99), st.integers(50, 99)), min_size=ENOUGH, max_size=40),
        st.floats(0, 3),
        st.floats(0, 3),
    )
    def test_prices_without_noise_are_found(self, seen, a, b):
        plane = Plane()
        for x, y in seen:
            plane.observe(x, y, a * x + b * y)
        last = seen[-1]
        assert plane.seconds(*last) == pytest.approx(a * last[0] + b * last[1], rel=0.05, abs=1e-6)

    @given(
        st.lists(st.tuples(st.integers(1, 999), st.integers(0, 999), st.floats(0, 99)), min_size=ENOUGH),
        st.integers(1, 999),
        st.integers(0, 999),
    )
    def test_more_never_takes_less(self, seen, x, y):
        plane = Plane()
        for each in seen:
            plane.observe(*each)
        assert 0 <= plane.seconds(x, y) <= plane.seconds(x + 1, y + 1) * (1 + 1e-9)

    def test_nothing_is_said_before_enough_is_known(self):
        plane = Plane()
        for _ in range(ENOUGH - 1):
            plane.observe(8, 1, 1.0)
            assert plane.seconds(8, 1) is None
        plane.observe(8, 1, 1.0)
        assert plane.seconds(8, 1) == pytest.approx(1.0)

    def test_one_that_hung_does_not_count_for_what_it_took(self):
        plane = Plane()
        for _ in range(10):
            plane.observe(8, 1, 1.0)
        plane.observe(8, 1, 600.0)
        assert plane.seconds(8, 1) <= 1.0 + OUTLIER / 4


def used(lanes: int = 1, block_s: float = 0.25, latency_s: float = 0.0) -> ReceiveQueue:
    """A queue that knows what loads take."""
    queue = ReceiveQueue(lanes)
    for blocks in (4, 16) * ENOUGH:
        queue._prices.observe(blocks, 1, latency_s + block_s * blocks)
    return queue


class TestReceiveQueue:
    def test_a_load_ends_when_all_before_it_and_it_are_there(self):
        queue = used()
        assert queue.load_s(8, 0.0) == pytest.approx(2.0)
        for name in "abc":
            queue.add(name, 8, 100.0)
        assert queue.load_s(4, 100.0) == pytest.approx(7.0)

    def test_what_has_been_brought_meanwhile_is_not_waited_for(self):
        queue = used()
        for name in "ab":
            queue.add(name, 8, 100.0)
        assert queue.load_s(8, 101.0) == pytest.approx(5.0)
        queue.reported(["a"], 102.0)
        assert queue.load_s(8, 102.0) == pytest.approx(4.0)
        assert queue.load_s(8, 190.0) == pytest.approx(2.0), "late: about to land"

    @pytest.mark.parametrize("lanes", [2, 4])
    def test_a_link_that_lanes_share_brings_no_more(self, lanes):
        """A short load beside a long one, while a lane is idle, shares the link; else it queues."""
        queue = used(lanes)
        queue.add("long", 64, 0.0)
        assert queue.load_s(4, 0.0) == pytest.approx(2.0)
        for i in range(lanes):
            queue.add(i, 64, 0.0)
        assert queue.load_s(4, 0.0) == pytest.approx(64 / 4 * (lanes + 1) + 1.0)

    def test_latencies_of_lanes_overlap(self):
        queue = used(4, block_s=0.0, latency_s=1.0)
        for i in range(8):
            queue.add(i, 1, 0.0)
        assert queue.load_s(1, 0.0) == pytest.approx(3.0)

    @pytest.mark.parametrize("lanes", [1, 4])
    def test_it_learns_from_what_comes_out_of_a_queue(self, lanes):
        """Twelve loads of eight blocks over a link of 4 blocks a second, reported one after the other."""
        queue = ReceiveQueue(lanes)
        for i in range(12):
            queue.add(i, 8, 100.0)
        queue.reported([], 100.1)
        for i in range(11):
            queue.reported([i], 102.0 + 2 * i)
        assert queue.load_s(8, 122.0) == pytest.approx(4.0, rel=0.05)

    def test_it_learns_nothing_while_a_step_hides_when_loads_ended(self):
        """Each load is alone, and reported at the end of a step of ten seconds: it may have taken one."""
        queue = ReceiveQueue()
        for i in range(2 * ENOUGH):
            queue.add(i, 8, 20.0 * i)
            queue.reported([], 20.0 * i + 0.1)
            queue.reported([i], 20.0 * i + 10.1)
        assert queue.load_s(8, 500.0) is None

    def test_it_learns_nothing_from_a_load_that_failed(self):
        queue = ReceiveQueue()
        for i in range(2 * ENOUGH):
            queue.add(i, 8, 2.0 * i)
            queue.reported([], 2.0 * i + 0.01)
            queue.reported([], 2.0 * i + 1.0)
            queue.reported([i], 2.0 * i + 1.01, failed=True)
        assert queue.load_s(8, 500.0) is None

    def test_a_load_that_is_never_reported_is_forgotten(self):
        queue = used()
        queue.add("dead", 999, 0.0)
        queue.add("a", 8, 700.0)
        assert queue.load_s(8, 700.0) == pytest.approx(4.0)

    def test_landings_are_in_their_order(self):
        queue = used()
        for name in "abc":
            queue.add(name, 8, 100.0)
        assert [(n, pytest.approx(s)) for n, s in queue.landings(101.0)] == [
            ("a", 1.0),
            ("b", 3.0),
            ("c", 5.0),
        ]


def fast(token_s: float = 0.001, decode_s: float = 0.05) -> PrefillSpeed:
    speed = PrefillSpeed(BUDGET)
    for _ in range(ENOUGH):
        speed.observe(Work(0), 8, decode_s)
        speed.observe(Work.of(0, 4096), 0, 4096 * token_s)
    return speed


class TestPrefillSpeed:
    def test_by_the_token(self):
        assert fast().seconds(Work.of(0, 2048)) == pytest.approx(2.048)

    def test_a_step_that_only_decodes_says_nothing_about_prefill(self):
        speed = PrefillSpeed(BUDGET)
        for _ in range(9):
            speed.observe(Work(0), 8, 0.05)
        assert speed.seconds(Work.of(0, 512)) is None

    def test_nor_does_a_step_of_a_few_tokens(self):
        """An accelerator takes as long for one token as for a hundred: by the token that would be absurd."""
        speed = fast()
        for _ in range(50):
            speed.observe(Work.of(4096, 3), 0, 0.05)
        assert speed.seconds(Work.of(0, 4096)) == pytest.approx(4.096)

    def test_decodes_beside_a_prefill_are_taken_off_and_added_again(self):
        speed = fast()
        for _ in range(9):
            speed.observe(Work.of(0, 4096), 8, 4.096 + 0.05)
        assert speed.seconds(Work.of(0, 4096)) == pytest.approx(4.096)
        assert speed.seconds(Work.of(0, 2 * BUDGET - 1).beside(Work(1)), 8) is None, "longer than any so far"
        assert speed.seconds(Work(2 * BUDGET), 8) == pytest.approx(2 * (BUDGET * 0.001 + 0.05))

    def test_a_prompt_takes_longer_the_more_is_before_it(self):
        """Attention: a price for each pair of tokens, found from chunks of one prompt."""
        speed = PrefillSpeed(BUDGET)
        for _ in range(ENOUGH):
            for first in (0, 2048, 4096):
                work = Work.of(first, 2048)
                speed.observe(work, 0, work.tokens * 1e-3 + work.pairs * 1e-6)
        late = Work.of(4096, 2048)
        assert speed.seconds(late) == pytest.approx(2.048 + late.pairs * 1e-6, rel=0.01)

    def test_nothing_is_said_of_prompts_far_longer_than_any_seen(self):
        speed = fast()
        assert speed.seconds(Work.of(0, int(REACH * 4096))) is not None
        assert speed.seconds(Work.of(0, int(REACH * 4096) + 1)) is None


class TestChosen:
    def chosen(self, load_s=10.0, compute_s=1.0, others_s=0.0, decodes=0, **policy) -> Chosen:
        expected = Expected(load_s, compute_s, compute_s, others_s, decodes)
        return expected.chosen(Policy(**policy), BUDGET)

    @pytest.mark.parametrize("unknown", ["load_s", "compute_s"])
    def test_with_nothing_learned_everybody_loads(self, unknown):
        assert self.chosen(**{unknown: None}) is Chosen.LOAD

    def test_whoever_is_clearly_sooner_by_computing_computes(self):
        assert self.chosen() is Chosen.COMPUTE

    @pytest.mark.parametrize(("load_s", "what"), [(1.25, Chosen.LOAD), (1.26, Chosen.COMPUTE)])
    def test_a_small_gain_is_none(self, load_s, what):
        assert self.chosen(load_s) is what

    @pytest.mark.parametrize(("others_s", "what"), [(9.0, Chosen.LOAD), (8.9, Chosen.COMPUTE)])
    def test_nobody_computes_at_a_greater_cost_to_others(self, others_s, what):
        assert self.chosen(others_s=others_s) is what

    @pytest.mark.parametrize(("decodes", "what"), [(8, Chosen.COMPUTE), (9, Chosen.LOAD)])
    def test_nobody_computes_beside_many_decodes(self, decodes, what):
        """0.001 of a budget of 8,192."""
        assert self.chosen(decodes=decodes) is what

    def test_the_table_can_be_read(self):
        expected = Expected(2.5, None, decodes=3)
        assert str(expected) == "load 2.500 s, compute unknown, others lose 0.000 s, 3 decode"
