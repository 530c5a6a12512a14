"""Who leads, who follows, and what each caller gets."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from singleflight.aio import FlightGroup, Outcome, Policy

pytestmark = pytest.mark.anyio


async def test_callers_of_one_key_share_one_load(open_bench: Any) -> None:
    async with open_bench() as bench:
        callers = [await bench.caller(["k"]) for _ in range(16)]
        (await bench.store.call(1)).succeed()
        for caller in callers:
            assert (await caller.ended()).values == {"k": ("k", 1)}
        assert bench.store.asked == [("k",)]
        assert bench.counts["fan_in"] == {"16": 1}


async def test_a_landed_key_is_not_remembered(open_bench: Any) -> None:
    async with open_bench() as bench:
        for number in (1, 2):
            caller = await bench.caller(["k"])
            (await bench.store.call(number)).succeed()
            assert (await caller.ended()).values == {"k": ("k", number)}


async def test_partial_overlap_loads_each_key_once_and_nobody_waits_to_start(open_bench: Any) -> None:
    async with open_bench() as bench:
        first = await bench.caller([1, 2, 3, 4, 5, 6, 7, 8])
        await bench.store.call(1)
        branch = await bench.caller([1, 2, 3, 4, "5'", "6'"])
        await bench.store.call(2)
        longer = await bench.caller(range(1, 13))
        await bench.store.call(3)
        # All three run at the same time.
        assert bench.store.asked == [(1, 2, 3, 4, 5, 6, 7, 8), ("5'", "6'"), (9, 10, 11, 12)]
        assert {call.state for call in bench.store.calls} == {"running"}
        bench.store.calls[1].succeed()
        bench.store.calls[0].succeed()
        assert list((await first.ended()).values) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert (await branch.ended()).values == {
            1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (4, 1), "5'": ("5'", 2), "6'": ("6'", 2)
        }  # fmt: skip
        assert longer.waits
        bench.store.calls[2].succeed()
        assert list((await longer.ended()).values) == list(range(1, 13))
        assert (bench.counts["blocks_led"], bench.counts["blocks_adopted"]) == (14, 12)


async def test_pending_keys_may_lie_between_missing_ones(open_bench: Any) -> None:
    async with open_bench() as bench:
        await bench.caller(["b", "d"])
        mixed = await bench.caller(["a", "b", "c", "d", "e"])
        await bench.store.call(2)
        assert bench.store.asked == [("b", "d"), ("a", "c", "e")]
        for call in bench.store.calls:
            call.succeed()
        assert (await mixed.ended()).values == {
            "a": ("a", 2), "b": ("b", 1), "c": ("c", 2), "d": ("d", 1), "e": ("e", 2)
        }  # fmt: skip


async def test_a_caller_follows_any_number_of_flights(open_bench: Any) -> None:
    async with open_bench() as bench:
        for key in "abc":
            await bench.caller([key])
        all_of_them = await bench.caller(["c", "a", "b"])
        assert bench.counts["flights"] == 3
        for number in (1, 2, 3):
            assert all_of_them.waits
            (await bench.store.call(number)).succeed()
        assert (await all_of_them.ended()).values == {"c": ("c", 3), "a": ("a", 1), "b": ("b", 2)}


async def test_landed_shows_what_is_there_before_the_rest(open_bench: Any) -> None:
    async with open_bench() as bench:
        first = await bench.caller(["a"])
        both = await bench.caller(["b", "a"])
        assert both.flight.landed == {}
        (await bench.store.call(1)).succeed()
        await first.ended()
        assert both.flight.landed == {"a": ("a", 1)}
        (await bench.store.call(2)).succeed()
        await both.ended()


async def test_the_load_runs_while_the_block_does_something_else(open_bench: Any) -> None:
    async with open_bench() as bench, bench.flights.join(["k"]) as flight:
        call = await bench.store.call(1)
        call.succeed()
        await call.over()
        assert await flight == {"k": ("k", 1)}
        assert flight.outcome is Outcome.READY


async def test_awaiting_again_gives_an_equal_dict_that_is_the_callers_own(open_bench: Any) -> None:
    async with open_bench() as bench, bench.flights.join(["k"]) as flight:
        (await bench.store.call(1)).succeed()
        mine = await flight
        mine.clear()
        assert await flight == {"k": ("k", 1)}


async def test_a_key_asked_twice_in_one_call_counts_once(open_bench: Any) -> None:
    async with open_bench() as bench:
        caller = await bench.caller(["k", "k", "j", "k"])
        (await bench.store.call(1)).succeed()
        assert (await caller.ended()).values == {"k": ("k", 1), "j": ("j", 1)}
        assert bench.store.asked == [("k", "j")]


async def test_no_keys_need_no_load(open_bench: Any) -> None:
    async with open_bench() as bench:
        assert await bench.flights.load([]) == {}
        assert bench.store.asked == []


async def test_a_loader_that_returns_at_once_leaves_nothing_behind(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        return {key: key for key in keys}

    async with FlightGroup(loader) as flights:
        assert await flights.load(["a", "b"]) == {"a": "a", "b": "b"}
        assert await flights.load(["a"]) == {"a": "a"}
    quiet(flights)


async def test_a_loader_that_asks_for_its_own_key_is_told_instead_of_waiting_for_itself(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        if keys == ("outer",):
            return {"outer": (await flights.load(["inner"]))["inner"]}
        return await flights.load(["outer"])

    async with FlightGroup(loader) as flights:
        with pytest.raises(Exception, match="the loader failed") as caught:
            await flights.load(["outer"])
        root: BaseException = caught.value
        while root.__cause__ is not None:
            root = root.__cause__
        assert isinstance(root, RuntimeError)
        assert "would wait for itself" in str(root)
    quiet(flights)


async def test_a_loader_may_ask_for_other_keys(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        if keys == ("outer",):
            return {"outer": await flights.load(["inner"])}
        return {key: key for key in keys}

    async with FlightGroup(loader) as flights:
        assert await flights.load(["outer"]) == {"outer": {"inner": "inner"}}
    quiet(flights)


async def test_at_the_table_bound_loads_run_unshared_and_the_table_does_not_grow(open_bench: Any) -> None:
    async with open_bench(policy=Policy(max_blocks=2)) as bench:
        inside = await bench.caller(["a", "b"])
        outside = [await bench.caller(["c"]), await bench.caller(["c"])]
        await bench.store.call(3)
        assert bench.store.asked == [("a", "b"), ("c",), ("c",)]
        assert (bench.counts["pending"], bench.counts["unregistered"]) == (2, 2)
        for call in bench.store.calls:
            call.succeed()
        assert (await inside.ended()).values == {"a": ("a", 1), "b": ("b", 1)}
        assert [(await caller.ended()).values for caller in outside] == [{"c": ("c", 2)}, {"c": ("c", 3)}]


async def test_an_unshared_load_stops_when_its_only_caller_leaves(open_bench: Any) -> None:
    async with open_bench(policy=Policy(max_blocks=1), keep_running=True) as bench:
        caller = await bench.caller(["a", "b"])
        call = await bench.store.call(1)
        caller.cancel()
        await call.over()
        assert call.state == "cancelled"


@pytest.mark.parametrize("keys", ["block", b"block"])
async def test_a_lone_string_is_not_a_run_of_letters(open_bench: Any, keys: Any) -> None:
    async with open_bench() as bench:
        with pytest.raises(TypeError, match=r"for one key write \[b?'block'\]"):
            bench.flights.join(keys)


@pytest.mark.parametrize("deadline", [0, -1, float("nan")])
async def test_a_deadline_is_a_positive_number_of_seconds(open_bench: Any, deadline: float) -> None:
    async with open_bench() as bench:
        with pytest.raises(ValueError, match=r"deadline: .* is not accepted; give a number of seconds > 0"):
            bench.flights.join(["k"], deadline=deadline)


async def test_a_flight_is_awaited_inside_its_block(open_bench: Any) -> None:
    async with open_bench() as bench:
        flight = bench.flights.join(["k"])
        with pytest.raises(RuntimeError, match="inside its `async with` block"):
            await flight
        async with flight:
            pass
        with pytest.raises(RuntimeError, match="inside its `async with` block"):
            await flight
        with pytest.raises(RuntimeError, match="joined once"):
            async with flight:
                pass


async def test_leaving_the_block_wakes_another_task_that_awaits_the_flight(open_bench: Any) -> None:
    errors: list[BaseException] = []

    async def await_it(flight: Any) -> None:
        try:
            await flight
        except RuntimeError as error:
            errors.append(error)

    async with open_bench() as bench, bench.flights.join(["k"]) as flight:
        bench.tasks.start_soon(await_it, flight)
        await anyio.wait_all_tasks_blocked()
    assert len(errors) == 1
