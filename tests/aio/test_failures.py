"""Loaders that raise, forget, crash: who is told what, and who may try again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from singleflight.aio import FlightGroup, LoadFailed, Outcome, Policy, Reason

pytestmark = pytest.mark.anyio

NO_HANDOVER = Policy(max_handovers=0)


async def test_without_hand_overs_everybody_sees_the_error_as_an_instance_of_its_own(open_bench: Any) -> None:
    async with open_bench(policy=NO_HANDOVER) as bench:
        callers = [await bench.caller(["k"]) for _ in range(5)]
        failure = ConnectionError("store down")
        (await bench.store.call(1)).fail(failure)
        errors = [(await caller.ended()).error for caller in callers]
        assert all(type(error) is LoadFailed for error in errors)
        assert len({id(error) for error in errors}) == 5
        assert all(error.__cause__ is failure for error in errors)
        assert {caller.flight.reason for caller in callers} == {Reason.LEADER_FAILED}
        assert bench.store.asked == [("k",)]


async def test_the_first_follower_leads_again_and_the_others_attach(open_bench: Any) -> None:
    """Hazard E7: 32 callers, one failure, two loads."""
    async with open_bench() as bench:
        callers = [await bench.caller(["k"]) for _ in range(32)]
        (await bench.store.call(1)).fail()
        (await bench.store.call(2)).succeed()
        assert isinstance((await callers[0].ended()).error, LoadFailed)
        for caller in callers[1:]:
            assert (await caller.ended()).values == {"k": ("k", 2)}
        assert bench.store.asked == [("k",)] * 2
        assert bench.counts["handovers"] == 31


@pytest.mark.parametrize("handovers", [0, 1, 2, 5])
async def test_hand_overs_are_bounded_however_many_wait(open_bench: Any, handovers: int) -> None:
    async with open_bench(policy=Policy(max_handovers=handovers)) as bench:
        callers = [await bench.caller(["k"]) for _ in range(20)]
        for number in range(1, handovers + 2):
            (await bench.store.call(number)).fail()
        for caller in callers:
            assert isinstance((await caller.ended()).error, LoadFailed)
        assert len(bench.store.calls) == handovers + 1


async def test_a_caller_sees_the_failure_that_ended_its_wait(open_bench: Any) -> None:
    async with open_bench() as bench:
        await bench.caller(["k"])
        await bench.caller(["k"])
        last = await bench.caller(["k"])
        (await bench.store.call(1)).fail(OSError("first"))
        (await bench.store.call(2)).fail(OSError("second"))
        assert str((await last.ended()).error.__cause__) == "second"


async def test_a_caller_that_retries_at_once_never_meets_the_failed_flight(open_bench: Any) -> None:
    """Hazard H8."""
    async with open_bench(policy=NO_HANDOVER) as bench:
        values: dict[Any, Any] = {}

        async def retry() -> None:
            try:
                await bench.flights.load(["k"])
            except LoadFailed:
                values.update(await bench.flights.load(["k"]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(retry)
            (await bench.store.call(1)).fail()
            (await bench.store.call(2)).succeed()
        assert values == {"k": ("k", 2)}


async def test_a_failure_takes_only_its_own_keys_along(open_bench: Any) -> None:
    """Follows a, b and c; b fails, so b is loaded anew, alone, and a and c are not asked again."""
    async with open_bench() as bench:
        for key in "abc":
            await bench.caller([key])
        caller = await bench.caller(["a", "b", "c"])
        (await bench.store.call(1)).succeed()
        (await bench.store.call(2)).fail()
        await bench.store.call(4)
        assert bench.store.asked == [("a",), ("b",), ("c",), ("b",)]
        bench.store.calls[3].succeed()
        bench.store.calls[2].succeed()
        assert (await caller.ended()).values == {"a": ("a", 1), "b": ("b", 4), "c": ("c", 3)}


async def test_followers_of_a_failed_flight_lead_their_own_parts_of_it(open_bench: Any) -> None:
    async with open_bench() as bench:
        await bench.caller([1, 2, 3, 4])
        left, right = await bench.caller([1, 2, 3]), await bench.caller([2, 3, 4])
        (await bench.store.call(1)).fail()
        await bench.store.call(3)
        # Trio starts tasks in any order.
        assert sorted(bench.store.asked[1:]) == [(1, 2, 3), (4,)]
        for call in bench.store.calls[1:]:
            call.succeed()
        assert list((await left.ended()).values) == [1, 2, 3]
        assert list((await right.ended()).values) == [2, 3, 4]


async def test_two_callers_released_together_keep_the_flight_they_both_still_follow(open_bench: Any) -> None:
    """A gave-up caller must not cancel a load which the next one in line is about to attach to again."""
    async with open_bench(policy=Policy(max_handovers=1)) as bench:
        owner = await bench.caller(["c"])
        await bench.caller(["x"])
        tired = await bench.caller(["x", "c"])
        (await bench.store.call(2)).fail()  # the bound of `tired` is used up; it leads x again
        assert (await bench.store.call(3)).keys == ("x",)
        fresh = await bench.caller(["x", "c"])
        owner.cancel()
        await owner.ended()
        bench.store.calls[2].fail()
        assert isinstance((await tired.ended()).error, LoadFailed)
        (await bench.store.call(4)).succeed()
        bench.store.calls[0].succeed()
        assert (await fresh.ended()).values == {"x": ("x", 4), "c": ("c", 1)}


async def test_a_leader_whose_load_fails_leaves_what_it_followed(open_bench: Any) -> None:
    async with open_bench() as bench:
        first = await bench.caller(["a"])
        both = await bench.caller(["a", "b"])
        (await bench.store.call(2)).fail()
        error = (await both.ended()).error
        assert isinstance(error, LoadFailed)
        assert error.keys == ("a", "b")
        bench.store.calls[0].succeed()
        assert (await first.ended()).values == {"a": ("a", 1)}


async def test_what_a_leader_followed_stops_at_once_if_nobody_else_wants_it(open_bench: Any) -> None:
    """At the failure, and not when the caller leaves its block, which its fallback may hold open for long."""
    recomputed = anyio.Event()

    async def fallback(keys: Any) -> Any:
        await recomputed.wait()
        return dict.fromkeys(keys, "recomputed")

    async with open_bench(fallback=fallback) as bench:
        first = await bench.caller(["a"])
        both = await bench.caller(["a", "b"])
        first.cancel()
        await first.ended()
        (await bench.store.call(2)).fail()
        load_a = await bench.store.call(1)
        await load_a.over()
        assert (load_a.state, both.waits) == ("cancelled", True)
        recomputed.set()
        assert (await both.ended()).values == {"a": "recomputed", "b": "recomputed"}


async def test_what_a_caller_leads_stays_its_own_when_what_it_follows_fails(open_bench: Any) -> None:
    async with open_bench() as bench:
        await bench.caller(["a"])
        both = await bench.caller(["a", "b"])
        await bench.store.call(2)
        bench.store.calls[0].fail()
        await bench.store.call(3)
        assert bench.store.asked == [("a",), ("b",), ("a",)]
        bench.store.calls[2].succeed()
        bench.store.calls[1].succeed()
        assert (await both.ended()).values == {"a": ("a", 3), "b": ("b", 2)}
        # It never became its own follower: b and the second a were loaded for one caller.
        assert (bench.counts["attached"], bench.counts["fan_in"]) == (1, {"1": 2, "2": 1})


async def test_the_error_names_what_is_missing(open_bench: Any) -> None:
    async with open_bench(policy=NO_HANDOVER) as bench:
        await bench.caller(["a"])
        caller = await bench.caller(["a", "b", "c", "d", "e"])
        (await bench.store.call(1)).succeed()
        (await bench.store.call(2)).fail()
        error = (await caller.ended()).error
        assert error.keys == ("b", "c", "d", "e")
        assert str(error) == "the loader failed; without a value: 4 keys ('b', 'c', 'd', …)"


async def test_the_fallback_is_called_by_each_caller_for_what_it_misses(open_bench: Any) -> None:
    asked: list[Any] = []

    async def fallback(keys: Any) -> Any:
        asked.append(tuple(keys))
        return dict.fromkeys(keys, "recomputed")

    async with open_bench(policy=NO_HANDOVER, fallback=fallback) as bench:
        await bench.caller(["a"])
        one, two = await bench.caller(["a", "b"]), await bench.caller(["b"])
        (await bench.store.call(1)).succeed()
        (await bench.store.call(2)).fail()
        assert (await one.ended()).values == {"a": ("a", 1), "b": "recomputed"}
        assert (await two.ended()).values == {"b": "recomputed"}
        assert asked == [("b",), ("b",)]
        assert two.flight.outcome is Outcome.FELL_BACK


async def test_a_fallback_that_raises_says_what_came_before(open_bench: Any) -> None:
    async def fallback(keys: Any) -> Any:
        raise MemoryError("no room to recompute")

    async with open_bench(policy=NO_HANDOVER, fallback=fallback) as bench:
        caller = await bench.caller(["k"])
        (await bench.store.call(1)).fail()
        error = (await caller.ended()).error
        assert isinstance(error, MemoryError)
        assert isinstance(error.__context__, LoadFailed)


@pytest.mark.parametrize(
    ("returned", "cause"),
    [({"a": 1}, "no value for 'b'"), (["a", "b"], "returned list"), (None, "returned NoneType")],
)
async def test_a_loader_that_does_not_return_every_value_has_failed(
    quiet: Any, returned: Any, cause: str
) -> None:
    async def loader(keys: Any) -> Any:
        return returned

    async with FlightGroup(loader) as flights:
        with pytest.raises(LoadFailed) as caught:
            await flights.load(["a", "b"])
        assert cause in str(caught.value.__cause__)
    quiet(flights)


async def test_none_is_a_value(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        return dict.fromkeys(keys)

    async with FlightGroup(loader) as flights:
        assert await flights.load(["k"]) == {"k": None}


class Crash(BaseException):
    pass


async def test_a_crash_in_the_loader_tells_all_callers_and_ends_the_group(
    start: Any, store_class: Any, quiet: Any
) -> None:
    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with flights:
                callers = [await start(tasks, flights, [key]) for key in ("k", "k", "other")]
                (await store.call(1)).fail(Crash())
                await anyio.sleep_forever()
    assert caught.group_contains(Crash)
    errors = [caller.error for caller in callers]
    assert [type(error).__name__ for error in errors] == ["LoadFailed", "LoadFailed", "FlightReset"]
    assert [type(error.__cause__).__name__ for error in errors] == ["Crash", "Crash", "NoneType"]
    quiet(flights)


async def test_a_failure_that_nobody_waits_for_is_logged(open_bench: Any, caplog: Any) -> None:
    async with open_bench(keep_running=True) as bench:
        caller = await bench.caller(["k"])
        call = await bench.store.call(1)
        caller.cancel()
        await caller.ended()
        call.fail(OSError("the store is gone"))
        await call.over()
    assert "nobody waits for it: OSError('the store is gone')" in caplog.text
