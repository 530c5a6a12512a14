"""What operators and other features of vLLM do to those who load, and to those who wait for a load.

Everything here runs with both schedulers: asynchronous scheduling is vLLM's default on GPUs. Besides what is
asserted here, `World` checks each slot read, each cached block and, at the end, all tokens and free blocks.
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

DEADLINE = {"deadline_base_s": 1.0, "deadline_per_token_s": 0.0}


def fell_back(w: World) -> int:
    return sum(w.layer_counters()["fell_back"].values())


class TestPriority:
    def test_a_high_priority_request_shares_the_load_of_a_low_priority_one(self, like: Make) -> None:
        """vLLM asks the one that came later first, once it is there; the load is in the air all the same."""
        w = like(policy="priority", watermark=0.1, blocks=30, hold=True)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        other = w.add(w.prompt("xy"), tokens=9, priority=3)
        low = w.add(prompt, tokens=3, priority=9)
        w.step(2)
        high = w.add(prompt, tokens=3, priority=0)
        w.step(3)
        assert w.loads == [low]
        w.land(low)
        w.run()
        assert w.gets == 1
        assert [w.tokens_computed(r) for r in (low, high)] == [2 + 2] * 2
        assert [w.status(r) for r in (other, low, high)] == ["length"] * 3

    def test_a_high_priority_request_need_not_wait_for_a_low_priority_load_that_hangs(
        self, like: Make
    ) -> None:
        w = like(policy="priority", watermark=0.1, blocks=30, options=DEADLINE)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        low = w.add(prompt, priority=9)
        w.hang(low)
        w.step(2)
        high = w.add(prompt, priority=0)
        w.step(3)
        asked = w.now
        w.advance(1.0)
        while w.status(high) != "length":
            w.step()
            assert w.now < asked + 2.0
        assert w.loads == [low]
        w.run()

    def test_the_watermark_stays_free(self, like: Make) -> None:
        """Sixteen blocks, four of them to stay free. One request decodes; four share a prefix of four
        blocks and have one block each. Whoever is admitted beside a running one leaves four."""
        w = like(policy="priority", watermark=0.25, blocks=16, lanes=2)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        running = w.add(w.prompt("wxyz"), tokens=3)
        w.step()
        requests = [w.add(prompt, tokens=3, priority=i) for i in range(4, 0, -1)]
        fewest = 16
        while w.status(running) != "length":
            w.step()
            fewest = min(fewest, w.loop.pool.get_num_free_blocks())
        assert fewest >= 4
        w.run()
        assert w.gets == 1
        assert {w.status(r) for r in requests} == {"length"}

    @pytest.mark.parametrize("watermark", [0.0, 0.15])
    def test_preemption_of_those_who_share_a_load(self, like: Make, watermark: float) -> None:
        """Two low-priority requests decode behind one load; one of high priority takes their blocks."""
        w = like(policy="priority", watermark=watermark, blocks=14, reserve_full=False)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        low = [w.add(prompt, tokens=12, priority=9) for _ in range(2)]
        while not all(w.said(r) for r in low):
            w.step()
        high = w.add(w.prompt("efg"), tokens=20, priority=0)
        w.run(400)
        preempted = [line for line in w.story().splitlines() if "preempted:" in line]
        assert preempted, "the pool was meant to be too small for three"
        assert not any(high in line for line in preempted)
        assert [w.status(r) for r in (*low, high)] == ["length"] * 3

    def test_preemption_of_a_leader_whose_blocks_a_better_one_has_adopted(self, like: Make) -> None:
        w = like(policy="priority", watermark=0.1, blocks=13, reserve_full=False, hold=True)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        low = w.add(prompt, tokens=16, priority=9)
        w.step(2)
        high = w.add(prompt, tokens=16, priority=1)
        other = w.add(w.prompt("ef"), tokens=16, priority=0)
        w.step(2)
        w.land()
        w.run(400)
        assert "preempted" in w.story(), "the pool was meant to be too small for three"
        assert [w.status(r) for r in (low, high, other)] == ["length"] * 3
        assert w.tokens_computed(high) == 1 + 15


class TestDataParallel:
    """The engines of a deployment share the store and nothing else: each has its own table."""

    def test_each_engine_loads_for_itself(self, like: Make) -> None:
        one = like(hold=True)
        other = like(hold=True, beside=one)
        prompt = one.prompt("abcd")
        one.store.put(prompt)
        mine = [one.add(prompt) for _ in range(3)]
        one.step(3)
        theirs = [other.add(prompt, name=f"other{i}") for i in range(3)]
        other.step(3)
        assert (one.loads, other.loads) == ([mine[0]], [theirs[0]])
        other.land()
        other.run()
        assert [other.status(r) for r in theirs] == ["length"] * 3
        assert one.loads == [mine[0]], "nobody has touched it"
        one.run()
        for engine in (one, other):
            assert engine.gets == 1
            counted = engine.layer_counters()
            assert (counted["flights"], counted["attached"]) == (1, 2)

    def test_what_goes_wrong_on_one_engine_stays_there(self, like: Make) -> None:
        """One engine's Get hangs and its caches are reset; the other, with the same prompt, goes on."""
        one = like(options=DEADLINE)
        other = like(beside=one, options=DEADLINE)
        prompt = one.prompt("abcd")
        one.store.put(prompt)
        leader, follower = one.add(prompt), one.add(prompt)
        one.hang(leader)
        one.step(3)
        theirs = [other.add(prompt, name=f"other{i}") for i in range(2)]
        other.step(2)
        one.advance(1.0)
        one.step(5)
        one.reset()
        assert one.status(follower) == "length"
        other.run()
        assert other.gets == 1
        assert fell_back(other) == 0
        assert [other.tokens_computed(r) for r in theirs] == [1, 1]
        one.run()

    def test_what_one_engine_has_saved_the_other_loads(self, like: Make) -> None:
        one = like()
        other = like(beside=one)
        prompt = one.prompt("abcd")
        one.add(prompt)
        one.run()
        requests = [other.add(prompt, name=f"other{i}", tokens=2) for i in range(3)]
        other.run()
        assert other.gets == 1
        assert [other.tokens_computed(r) for r in requests] == [1 + 1] * 3


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("v2_runner", [False, True], ids=["v1", "v2"])
class TestStages:
    """Pipeline parallelism: two to four batches are in flight. What the worker is asked in one is answered by
    all stages when that one is done."""

    def test_a_follower_leaves_in_time(self, like: Make, mode: str, stages: int, v2_runner: bool) -> None:
        """A deadline passes while the leader's Get hangs."""
        w = like(stages=stages, v2_runner=v2_runner, late_forwards=True, options=DEADLINE)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        leader = w.add(prompt)
        w.hang(leader)
        w.step(2)
        follower, busy = w.add(prompt), w.add(w.prompt("xyz"), tokens=40)
        w.step(2 * stages)
        w.advance(1.0)
        late = w.now
        while w.status(follower) != "length":
            w.step()
            assert w.now < late + 1.0
        assert w.status(busy) == "RUNNING"
        assert fell_back(w) == 1
        assert w.loads == [leader]
        w.run()

    def test_an_aborted_follower_gives_its_blocks_back(
        self, like: Make, mode: str, stages: int, v2_runner: bool
    ) -> None:
        w = like(stages=stages, v2_runner=v2_runner, late_forwards=True, hold=True)
        prompt = w.prompt("abcd", tail=3)
        w.store.put(prompt)
        leader = w.add(prompt)
        w.step(2)
        free = w.loop.pool.get_num_free_blocks()
        follower = w.add(w.prompt("abcdxy"), name="follower")
        w.step(2 * stages)
        w.abort(follower)
        w.step(2 * stages + 2)
        assert w.loop.pool.get_num_free_blocks() == free
        assert w.loads == [leader]
        w.run()
        assert (w.gets, w.status(leader)) == (1, "length")


class TestSleep:
    """`sleep(level=1)` pauses the scheduler and resets all caches, the connector's too; `wake_up` goes on."""

    def test_sleep_that_aborts_waits_for_the_load_and_leaves_nothing(
        self, like: Make, world: Make, async_scheduling: bool
    ) -> None:
        for w in (like(), world(mode="stock", async_scheduling=async_scheduling)):
            prompt = w.prompt("abcd")
            w.store.put(prompt)
            requests = [w.add(prompt, tokens=3) for _ in range(3)]
            w.step(3)
            assert w.loads
            assert w.sleep("abort"), "all blocks are back: the reset works"
            assert {w.status(r) for r in requests} == {"abort"}
            assert not w.store.has(prompt, 0)
            before = w.gets
            late = w.add(prompt, tokens=3)
            w.step(5)
            assert w.tokens_computed(late) == 0, "asleep"
            w.resume()
            w.run()
            assert w.gets == before, "the store has been wiped"
            assert w.tokens_computed(late) == 17 + 2

    def test_sleep_that_keeps_requests_is_refused_while_a_load_writes(
        self, like: Make, world: Make, async_scheduling: bool
    ) -> None:
        """vLLM raises, with the stock connector too: blocks are in use. Nothing is lost by it."""
        for w in (like(hold=True), world(mode="stock", async_scheduling=async_scheduling, hold=True)):
            prompt = w.prompt("abcd")
            w.store.put(prompt)
            requests = [w.add(prompt, tokens=3) for _ in range(3)]
            w.step(3)
            assert not w.sleep("keep")
            w.resume()
            w.run()
            assert {w.status(r) for r in requests} == {"length"}
            assert w.gets == (3 if w.setup.mode == "stock" else 1)

    def test_sleep_that_keeps_requests_starts_them_again(self, like: Make) -> None:
        """Nothing is in the air: all that decode are preempted, and compute again what is in no cache."""
        w = like()
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        requests = [w.add(prompt, tokens=8) for _ in range(3)]
        while not all(w.said(r) for r in requests):
            w.step()
        assert w.sleep("keep")
        w.step(3)
        w.resume()
        w.run()
        assert {w.status(r) for r in requests} == {"length"}
        assert w.gets == 1

    def test_sleep_that_waits_lets_the_load_and_its_followers_end(self, like: Make, mode: str) -> None:
        """Who holds blocks comes to its end before the engine sleeps. A parked request holds none: it stays
        queued as any other, and finds wiped caches when the engine wakes up."""
        from . import releases

        if not releases.drains_loads_when_paused():
            pytest.skip("before vLLM 0.32 a load does not end in a pause")
        w = like()
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        leader, *followers = [w.add(prompt, tokens=3) for _ in range(3)]
        w.step(3)
        assert w.sleep("wait")
        assert w.status(leader) == "length"
        assert {w.status(r) for r in followers} == {"length" if mode == "attach" else "WAITING"}
        w.advance(1000.0)
        w.resume()
        w.run()
        assert w.gets == 1
        assert {w.status(r) for r in followers} == {"length"}
        assert fell_back(w) == 0


@pytest.mark.parametrize("everything", [True, False], ids=["all", "new"])
class TestPause:
    """`pause_scheduler`, for a weight update: longer than any deadline."""

    def test_what_has_landed_meanwhile_has_landed(self, like: Make, everything: bool) -> None:
        w = like(options=DEADLINE, hold=True)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        requests = [w.add(prompt, tokens=2) for _ in range(3)]
        w.step(3)
        w.pause(everything=everything)
        w.land()
        w.advance(100.0)
        w.step(3)
        w.resume()
        w.run()
        assert fell_back(w) == 0
        assert w.gets == 1
        assert [w.tokens_computed(r) for r in requests] == [1 + 1] * 3

    def test_what_has_not_landed_by_then_is_late(self, like: Make, everything: bool) -> None:
        """A pause does not stop the clock: who waits for a hung Get goes as soon as the engine does."""
        w = like(options=DEADLINE)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        leader, *followers = [w.add(prompt, tokens=2) for _ in range(3)]
        w.hang(leader)
        w.step(3)
        w.pause(everything=everything)
        w.advance(100.0)
        w.step(3)
        w.resume()
        w.step(12)
        assert [w.status(r) for r in followers] == ["length"] * 2
        assert w.loads == [leader]
        w.run()
        assert fell_back(w) == 2


class TestStreamingInput:
    """A resumable request is fed in chunks; vLLM keeps its blocks in between."""

    def test_a_session_follows_a_load(self, like: Make) -> None:
        w = like(hold=True)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        leader = w.add(prompt, tokens=2)
        w.step(2)
        session = w.add(prompt, tokens=3, resumable=True)
        w.step(2)
        assert w.loads == [leader]
        w.feed(session, w.prompt("ef", tail=3), tokens=2)
        w.land()
        w.step(12)
        w.feed(session, w.prompt("gh"), tokens=4)
        w.step(12)
        w.close(session)
        w.run()
        assert w.gets == 1
        assert len(w.said(session)) == 3 + 2 + 4
        assert w.tokens_computed(session) == (2 + 2) + (11 + 1) + (9 + 3)

    def test_a_session_leads_a_load(self, like: Make) -> None:
        w = like(hold=True)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        session = w.add(prompt, tokens=3, resumable=True)
        w.step(2)
        follower = w.add(prompt, tokens=2)
        w.feed(session, w.prompt("ef"), tokens=2)
        w.close(session)
        w.step(2)
        assert w.loads == [session]
        w.land()
        w.run()
        assert w.gets == 1
        assert w.tokens_computed(follower) == 2 + 1

    def test_a_chunk_grows_into_what_another_loads(self, like: Make) -> None:
        """vLLM does not look up a later chunk: the session computes it while another loads the same."""
        w = like(hold=True)
        whole = w.prompt("abcdef")
        w.store.put(whole)
        session = w.add(whole[:16], tokens=1, resumable=True)
        w.step(2)
        w.land()
        w.step(8)
        other = w.add(whole, tokens=2)
        w.step(2)
        w.feed(session, whole[16:], tokens=2)
        w.step(8)
        w.land()
        w.close(session)
        w.run()
        assert [w.status(r) for r in (session, other)] == ["length"] * 2

    def test_a_session_that_leads_is_aborted(self, like: Make) -> None:
        w = like(hold=True)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        session = w.add(prompt, tokens=3, resumable=True)
        w.step(2)
        follower = w.add(prompt, tokens=2)
        w.step(2)
        w.feed(session, w.prompt("ef"), tokens=2)
        w.abort(session)
        w.land()
        w.run()
        assert w.status(follower) == "length"
        assert w.gets <= 2

    def test_a_session_is_preempted_between_its_chunks(self, like: Make) -> None:
        from . import releases

        if not releases.drops_hashes_of_discarded_tokens():
            pytest.skip("before vLLM 0.32 a session keeps the hashes of tokens that are thrown away")
        w = like(blocks=12, policy="priority", reserve_full=False)
        prompt = w.prompt("abcd", tail=2)
        w.store.put(prompt)
        session = w.add(prompt, tokens=2, priority=9, resumable=True)
        follower = w.add(prompt, tokens=12, priority=9)
        while not w.said(session):
            w.step()
        high = w.add(w.prompt("xyz"), tokens=20, priority=0)
        w.feed(session, w.prompt("ef"), tokens=9)
        w.close(session)
        w.run(400)
        assert "preempted" in w.story()
        assert [w.status(r) for r in (session, follower, high)] == ["length"] * 3


def test_what_was_loaded_is_evicted_before_the_follower_is_admitted(like: Make, mode: str) -> None:
    """One request runs at a time. What the last in line waits for lands, and before its turn comes a bigger
    request evicts it, time after time. Parked, it waits again within one deadline, and then loads for itself.
    Attached, it holds the blocks, and they stay. Nobody loads twice."""
    w = like(policy="priority", blocks=12, max_seqs=1, hold=True, options=DEADLINE)
    prompt = w.prompt("abcd")
    w.store.put(prompt)
    leaders = [w.add(prompt, priority=1)]
    w.step(2)
    last, asked = w.add(prompt, priority=9, tokens=2), w.now
    while w.status(last) != "length":
        assert w.now < asked + 1.0 + 2 * 0.8, "one deadline, then a load of its own"
        w.step(3)
        w.advance(0.6)
        w.land()
        if w.now < asked + 1.5:
            w.add(w.prompt("".join(chr(256 + 16 * len(leaders) + i) for i in range(10))), priority=0)
            leaders.append(w.add(prompt, priority=1))
        w.step(10)
    w.run()
    gets = w.workers[0].attempts
    assert max(gets.values()) == 1
    assert gets.get(last, 0) == {"attach": 0, "park": 1}[mode]
    assert set(gets) <= {*leaders, last}


@pytest.mark.parametrize(("elapsed", "waits"), [(0.5, False), (1.5, True)])
def test_a_follower_waits_unless_its_own_load_would_land_first(
    like: Make, elapsed: float, waits: bool
) -> None:
    """Loads have taken a second a block. Two blocks of one's own, beside a flight of five, are there in four
    seconds; the flight has its five but for those that have passed."""
    w = like(lanes=2, hold=True)
    for i, length in enumerate((1, 8) * 4):
        seen = w.prompt("".join(chr(256 + 8 * i + n) for n in range(length)))
        w.store.put(seen)
        w.add(seen)
        w.step(2)
        w.advance(length)
        w.land()
        w.step(4)
    prompt = w.prompt("abcde")
    w.store.put(prompt)
    leader = w.add(prompt)
    w.step(2)
    w.advance(elapsed)
    follower = w.add(w.prompt("ab"))
    w.step(2)
    assert w.loads == ([leader] if waits else [leader, follower])
    w.run()


class TestFailedLoads:
    def test_who_has_room_starts_again_in_the_very_next_pass(self, like: Make) -> None:
        """The first block of the load cannot be read. Letting others pass is for those who find no room."""
        w = like(recompute=True, hold=True)
        prompt = w.prompt("abcd")
        w.store.put(prompt)
        w.store.fail(prompt, block=0)
        request = w.add(prompt, tokens=3)
        w.step(3)
        w.land()
        while "reported" not in w.story():
            w.step()
        w.step()
        assert w.tokens_computed(request) == 17
        w.run()

    @pytest.mark.parametrize(("rank", "there"), [(0, 4), (2, 1)])
    def test_what_is_there_on_all_ranks_is_not_computed(self, like: Make, rank: int, there: int) -> None:
        """The last key that one rank of three asks for cannot be read: of the fifth block, or, since ranks
        begin at different blocks, of the second."""
        w = like(recompute=True, ranks=3)
        prompt = w.prompt("abcde")
        w.store.put(prompt)
        w.fault("key", rank)
        request = w.add(prompt, tokens=3)
        w.run()
        assert w.tokens_computed(request) == (5 - there) * 4 + 1 + 2

    @pytest.mark.parametrize(("rank", "there"), [(0, 4), (2, 1)])
    def test_what_one_rank_could_not_read_nobody_asks_for_again_for_a_while(
        self, like: Make, rank: int, there: int
    ) -> None:
        """The next request has what comes before that block, and computes the rest."""
        w = like(ranks=3)
        prompt = w.prompt("abcde")
        w.store.put(prompt)
        w.fault("key", rank)
        first = w.add(prompt)
        w.step(30)
        second = w.add(prompt)
        w.run()
        assert (w.status(first), w.status(second)) == ("error", "length")
        assert w.tokens_computed(second) == (5 - there) * 4 + 1

    def test_who_finds_no_room_lets_those_pass_whose_loads_are_complete(self, like: Make) -> None:
        """25 blocks. A load of eight hangs until the deadline of whoever shares them, who then needs 13,
        and 12 are free. The last in line has its five."""
        w = like(blocks=25, lanes=3, hold=True, options=DEADLINE)
        prompt, other = w.prompt("abcdefghijkl"), w.prompt("vwxyz")
        for stored in (prompt, other):
            w.store.put(stored)
        leader = w.add(prompt[:33])
        w.step(2)
        late, last = w.add(prompt), w.add(other, tokens=2)
        w.step(3)
        w.advance(1.0)
        for request in (late, last):
            w.land(request)
        w.step(20)
        assert w.status(last) == "length"
        assert w.loads == [leader]
        w.run()
        assert w.status(late) == "length"


def test_a_load_behind_a_local_hit_serves_its_followers(like: Make) -> None:
    """What it stands on was published long ago."""
    w = like(hold=True)
    first, prompt = w.prompt("ab"), w.prompt("abcdef")
    w.add(first)
    w.step(9)
    w.store.put(prompt)
    leader, *followers = [w.add(prompt, tokens=2) for _ in range(3)]
    w.step(3)
    assert w.loads == [leader]
    w.run()
    assert w.gets == 1
    assert [w.tokens_computed(r) for r in (leader, *followers)] == [1 + 1] * 3
    assert fell_back(w) == 0
