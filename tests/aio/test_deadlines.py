"""Deadlines, to the exact second: trio's clock jumps ahead whenever every task sleeps."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest
import trio.testing

from singleflight.aio import FlightGroup, FlightTimeout, Outcome, Policy, Reason

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture
def open_bench(open_bench: Any) -> Any:
    """The clock jumps to whatever is due next, so the limit of a hanging test must be far away."""
    return lambda **options: open_bench(give_up_s=1e6, **options)


POLICY = Policy(deadline_base_s=10, deadline_per_block_s=0.5, max_handovers=1)


async def at(start: float, seconds: float) -> None:
    await anyio.sleep_until(start + seconds)


@pytest.mark.parametrize(("keys", "seconds"), [(1, 10.5), (8, 14.0)])
async def test_without_a_deadline_of_its_own_a_caller_waits_for_the_policys_budget(
    open_bench: Any, keys: int, seconds: float
) -> None:
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        caller = await (await bench.caller(range(keys))).ended()
        assert caller.ended_at - start == seconds
        assert isinstance(caller.error, FlightTimeout)
        assert isinstance(caller.error, TimeoutError)


async def test_the_budget_is_for_the_whole_flight_of_which_a_caller_wants_one_key(open_bench: Any) -> None:
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        await bench.caller(range(20), deadline=1000)
        caller = await (await bench.caller([7])).ended()
        assert caller.ended_at - start == 10 + 20 * 0.5


@pytest.mark.parametrize(
    ("options", "keys", "seconds"),
    [
        ({}, [7], 2 * 10.5),
        ({}, [7, 8, 9], 2 * 11.5),
        ({}, ["own", 7], 2 * 11),
        ({"deadline_factor": 1}, [7], 10.5),
        ({"deadline_factor": 3.5}, [7], 3.5 * 10.5),
        ({"deadline_factor": math.inf}, [7], 10 + 10_000 * 0.5),
    ],
)
async def test_a_caller_of_few_keys_does_not_wait_out_the_budget_of_a_huge_load(
    open_bench: Any, options: dict[str, float], keys: list[Any], seconds: float
) -> None:
    """Case 20: the bulk load may take 5,010 s; who wants one key of it gives up by the measure of one key."""
    async with open_bench(policy=POLICY, **options) as bench:
        start = anyio.current_time()
        bulk = await bench.caller(range(10_000))
        caller = await (await bench.caller(keys)).ended()
        assert caller.ended_at - start == seconds
        assert isinstance(caller.error, FlightTimeout)
        # The bulk load's own caller has its whole budget.
        assert (await bulk.ended()).ended_at - start == 10 + 10_000 * 0.5


async def test_a_deadline_of_ones_own_is_not_bounded_by_the_number_of_keys(open_bench: Any) -> None:
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        await bench.caller(range(10_000))
        caller = await (await bench.caller([7], deadline=4000)).ended()
        assert caller.ended_at - start == 4000


@pytest.mark.parametrize("factor", [0, 0.99, -1, math.nan])
async def test_a_deadline_factor_is_at_least_one(store_class: Any, factor: float) -> None:
    with pytest.raises(ValueError, match=r"deadline_factor: .* is not accepted; give a number >= 1"):
        FlightGroup(store_class().load, deadline_factor=factor)


async def test_a_hanging_loader_holds_nobody_and_is_cancelled_with_its_last_caller(open_bench: Any) -> None:
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        leader = await bench.caller(["k"], deadline=3)
        follower = await bench.caller(["k"], deadline=5)
        call = await bench.store.call(1)
        assert (await leader.ended()).ended_at - start == 3
        assert call.state == "running"
        assert (await follower.ended()).ended_at - start == 5
        await call.over()
        assert call.state == "cancelled"
        assert (follower.flight.outcome, follower.flight.reason) == (Outcome.FELL_BACK, Reason.DEADLINE)
        assert bench.counts["fell_back"]["deadline"] == 1


async def test_each_follower_leaves_at_its_own_time(open_bench: Any) -> None:
    async with open_bench() as bench:
        start = anyio.current_time()
        callers = [await bench.caller(["k"], deadline=seconds) for seconds in (7, 1, 4, 4, 2.5)]
        assert [(await caller.ended()).ended_at - start for caller in callers] == [7, 1, 4, 4, 2.5]


async def test_a_load_that_lands_just_before_the_deadline_is_in_time(open_bench: Any) -> None:
    async with open_bench() as bench:
        start = anyio.current_time()
        caller = await bench.caller(["k"], deadline=5)
        await at(start, 4.999)
        bench.store.calls[0].succeed()
        assert (await caller.ended()).values == {"k": ("k", 1)}
        assert caller.ended_at == start + 4.999


async def test_a_caller_in_a_hurry_does_not_stop_others_from_joining(open_bench: Any) -> None:
    """Hazard J2: otherwise sharing would switch itself off as soon as loads are slower than patience."""
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        patient = await bench.caller(["k"], deadline=100)
        for _ in range(5):
            hurried = await (await bench.caller(["k"], deadline=1)).ended()
            assert isinstance(hurried.error, FlightTimeout)
        assert anyio.current_time() == start + 5
        late = await bench.caller(["k"])
        bench.store.calls[0].succeed()
        assert (await late.ended()).values == (await patient.ended()).values == {"k": ("k", 1)}
        assert len(bench.store.calls) == 1


async def test_a_flight_past_the_policys_budget_is_left_and_led_anew(open_bench: Any) -> None:
    """Hazard H4: flight 1 overdue, flight 2 starts, flight 1 ends: who comes next joins flight 2."""
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        patient = await bench.caller(["k"], deadline=100)  # keeps the first load wanted
        usual = await (await bench.caller(["k"])).ended()
        assert usual.ended_at == start + 10.5
        second = await bench.caller(["k"])
        await bench.store.call(2)
        bench.store.calls[0].succeed()
        assert (await patient.ended()).values == {"k": ("k", 1)}
        third = await bench.caller(["k"])
        bench.store.calls[1].succeed()
        assert (await third.ended()).values == (await second.ended()).values == {"k": ("k", 2)}
        assert len(bench.store.calls) == 2


async def test_a_hanging_load_that_keeps_running_is_cancelled_at_the_policys_budget(open_bench: Any) -> None:
    async with open_bench(policy=POLICY, keep_running=True) as bench:
        start = anyio.current_time()
        await (await bench.caller(["k"], deadline=1)).ended()
        call = bench.store.calls[0]
        assert call.state == "running"
        await at(start, 9)
        last = await (await bench.caller(["k"])).ended()
        assert last.ended_at == start + 19.5
        await call.over()
        assert call.state == "cancelled"
        assert len(bench.store.calls) == 1


async def test_a_hand_over_leaves_an_overdue_flight_and_ends_it_if_it_was_the_last(open_bench: Any) -> None:
    async with open_bench(policy=POLICY) as bench:
        owner = await bench.caller(["slow"], deadline=100)
        await bench.caller(["broken"], deadline=100)
        both = await bench.caller(["slow", "broken"], deadline=100)
        await (await bench.caller(["slow"])).ended()  # the first flight of it is overdue now
        owner.cancel()
        await owner.ended()
        bench.store.calls[1].fail()
        assert (await bench.store.call(3)).keys == ("slow", "broken")
        await bench.store.calls[0].over()
        assert (bench.store.calls[0].state, both.waits) == ("cancelled", True)
        bench.store.calls[2].succeed()
        assert (await both.ended()).values == {"slow": ("slow", 3), "broken": ("broken", 3)}


async def test_a_hand_over_does_not_restart_the_deadline(open_bench: Any) -> None:
    async with open_bench() as bench:
        start = anyio.current_time()
        await bench.caller(["k"], deadline=50)
        followers = [await bench.caller(["k"], deadline=5) for _ in range(2)]
        await at(start, 4)
        bench.store.calls[0].fail()
        await bench.store.call(2)
        for follower in followers:
            assert (await follower.ended()).ended_at == start + 5
            assert isinstance(follower.error, FlightTimeout)


async def test_the_fallback_is_not_bounded_by_the_deadline(open_bench: Any) -> None:
    async def recompute(keys: Any) -> Any:
        await anyio.sleep(30)
        return dict.fromkeys(keys, "recomputed")

    async with open_bench(fallback=recompute) as bench:
        start = anyio.current_time()
        await bench.caller(["a"], deadline=100)
        caller = await bench.caller(["b", "a"], deadline=5)
        await at(start, 1)
        bench.store.calls[1].succeed()
        assert (await caller.ended()).values == {"b": ("b", 2), "a": "recomputed"}
        assert caller.ended_at == start + 35


async def test_the_deadline_counts_from_joining_and_not_from_awaiting(open_bench: Any) -> None:
    async with open_bench() as bench, bench.flights.join(["k"], deadline=5) as flight:
        start = anyio.current_time()
        await anyio.sleep(3)
        with pytest.raises(FlightTimeout):
            await flight
        assert anyio.current_time() == start + 5


async def test_values_that_are_there_are_given_out_after_the_deadline_too(open_bench: Any) -> None:
    async with open_bench() as bench, bench.flights.join(["k"], deadline=5) as flight:
        (await bench.store.call(1)).succeed()
        await anyio.sleep(20)
        assert await flight == {"k": ("k", 1)}


async def test_inf_is_no_deadline(open_bench: Any) -> None:
    async with open_bench() as bench:
        caller = await bench.caller(["k"], deadline=math.inf)
        await anyio.sleep(100_000)
        bench.store.calls[0].succeed()
        assert (await caller.ended()).values == {"k": ("k", 1)}


async def test_a_hanging_loader_holds_the_end_of_the_group_no_longer_than_its_callers_wait(
    start: Any, store_class: Any, quiet: Any
) -> None:
    flights: FlightGroup[Any, Any] = FlightGroup(store_class().load)
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        async with flights:
            caller = await start(tasks, flights, ["k"], deadline=7)
        assert anyio.current_time() == began + 7
    assert isinstance(caller.error, FlightTimeout)
    quiet(flights)


async def test_one_stuck_flight_does_not_hold_up_others(open_bench: Any) -> None:
    """Hazard J3."""
    async with open_bench() as bench:
        stuck = await bench.caller(["stuck"], deadline=1000)
        for number in range(2, 102):
            caller = await bench.caller([number])
            (await bench.store.call(number)).succeed()
            await caller.ended()
            assert bench.counts["pending"] == 1
        bench.store.calls[0].succeed()
        await stuck.ended()
