"""Cancellation at every moment there is, one test each; the name says which."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from singleflight.aio import FlightGroup, FlightReset, LoadFailed, Outcome

pytestmark = pytest.mark.anyio


async def test_leader_before_the_loader_has_begun(open_bench: Any) -> None:
    async with open_bench() as bench:
        async with bench.flights.join(["k"]):
            pass  # nothing yields in here, so the loader's task has not run yet
        second = await bench.caller(["k"])
        (await bench.store.call(1)).succeed()
        assert (await second.ended()).values == {"k": ("k", 1)}
        assert bench.store.asked == [("k",)]  # only the second caller's load ever began


async def test_leader_while_the_loader_runs_and_a_follower_waits(open_bench: Any) -> None:
    async with open_bench() as bench:
        leader = await bench.caller(["k"])
        follower = await bench.caller(["k"])
        call = await bench.store.call(1)
        leader.cancel()
        assert (await leader.ended()).cancelled
        assert (call.state, follower.waits) == ("running", True)
        call.succeed()
        assert (await follower.ended()).values == {"k": ("k", 1)}
        assert bench.counts["orphaned"] == 1


async def test_leader_gone_and_then_a_new_caller_arrives(open_bench: Any) -> None:
    async with open_bench() as bench:
        leader = await bench.caller(["k"])
        follower = await bench.caller(["k"])
        call = await bench.store.call(1)
        leader.cancel()
        await leader.ended()
        late = await bench.caller(["k"])
        call.succeed()
        assert (await late.ended()).values == (await follower.ended()).values == {"k": ("k", 1)}
        assert bench.store.asked == [("k",)]


async def test_leader_while_the_loader_runs_and_nobody_else_waits(open_bench: Any) -> None:
    async with open_bench() as bench:
        leader = await bench.caller(["k"])
        call = await bench.store.call(1)
        leader.cancel()
        await call.over()
        assert call.state == "cancelled"
        assert bench.counts["abandoned"] == 1


async def test_follower_while_the_leader_waits(open_bench: Any) -> None:
    async with open_bench() as bench:
        leader = await bench.caller(["k"])
        others = [await bench.caller(["k"]) for _ in range(3)]
        call = await bench.store.call(1)
        others[1].cancel()
        assert (await others[1].ended()).flight.outcome is Outcome.CANCELLED
        # The key stays (hazard H2): who comes now still joins.
        late = await bench.caller(["k"])
        call.succeed()
        for caller in (leader, others[0], others[2], late):
            assert (await caller.ended()).values == {"k": ("k", 1)}
        assert bench.store.asked == [("k",)]


async def test_last_follower_after_the_leader_has_gone(open_bench: Any) -> None:
    async with open_bench() as bench:
        callers = [await bench.caller(["k"]) for _ in range(3)]
        call = await bench.store.call(1)
        for caller in callers:
            assert call.state == "running"
            caller.cancel()
            await caller.ended()
        await call.over()
        assert call.state == "cancelled"


async def test_last_caller_while_the_loader_is_slow_to_stop_and_a_new_caller_arrives() -> None:
    """A new caller never joins a flight that is being cancelled."""
    runs = 0
    begun, stopping, may_stop = anyio.Event(), anyio.Event(), anyio.Event()

    async def loader(keys: Any) -> Any:
        nonlocal runs
        runs += 1
        run = runs
        if run == 1:
            try:
                begun.set()
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    stopping.set()
                    await may_stop.wait()
        return dict.fromkeys(keys, run)

    async with FlightGroup(loader) as flights:
        with anyio.CancelScope() as scope:
            async with flights.join(["k"]):
                await begun.wait()
                scope.cancel()
        await stopping.wait()
        assert await flights.load(["k"]) == {"k": 2}
        may_stop.set()


async def test_last_caller_and_the_cancelled_loader_returns_all_the_same() -> None:
    begun, may_return = anyio.Event(), anyio.Event()

    async def loader(keys: Any) -> Any:
        with anyio.CancelScope(shield=True):
            begun.set()
            await may_return.wait()
        return dict.fromkeys(keys, "too late")

    async with FlightGroup(loader) as flights:
        async with flights.join(["k"]) as flight:
            await begun.wait()
        may_return.set()
    assert flight.landed == {}
    assert (flights.snapshot()["landed"], flights.snapshot()["stale_reports"]) == (0, 1)


async def test_last_caller_in_a_group_that_keeps_running(open_bench: Any) -> None:
    async with open_bench(keep_running=True) as bench:
        leader = await bench.caller(["k"])
        call = await bench.store.call(1)
        leader.cancel()
        await leader.ended()
        late = await bench.caller(["k"])
        assert call.state == "running"
        call.succeed()
        assert (await late.ended()).values == {"k": ("k", 1)}


async def test_leader_of_one_flight_that_follows_another(open_bench: Any) -> None:
    """It holds a reference to each; leaving ends the one that nobody else wants, and only that."""
    async with open_bench() as bench:
        first = await bench.caller(["a"])
        both = await bench.caller(["a", "b"])
        load_a, load_b = await bench.store.call(1), await bench.store.call(2)
        both.cancel()
        await load_b.over()
        assert (load_a.state, load_b.state) == ("running", "cancelled")
        load_a.succeed()
        assert (await first.ended()).values == {"a": ("a", 1)}


async def test_caller_after_its_flight_landed_and_before_it_woke(open_bench: Any) -> None:
    async with open_bench() as bench:
        leader, follower = await bench.caller(["k"]), await bench.caller(["k"])
        call = await bench.store.call(1)

        async def cancel_when_landed() -> None:
            call.succeed()
            while leader.flight.outcome is None:
                await anyio.lowlevel.checkpoint()
            follower.cancel()

        bench.tasks.start_soon(cancel_when_landed)
        assert (await leader.ended()).values == {"k": ("k", 1)}
        await follower.ended()
        # Either is right for the follower, a value or its cancellation; never both, never neither.
        assert follower.cancelled is (follower.values is None)
        assert follower.error is None


async def test_caller_before_it_awaits(open_bench: Any) -> None:
    async with open_bench() as bench:
        with anyio.CancelScope() as scope:
            async with bench.flights.join(["k"]) as flight:
                call = await bench.store.call(1)
                scope.cancel()
                await flight
        assert scope.cancelled_caught
        await call.over()
        assert call.state == "cancelled"


async def test_caller_whose_values_are_there_already(open_bench: Any) -> None:
    async with open_bench() as bench:
        with anyio.CancelScope() as scope:
            async with bench.flights.join(["k"]) as flight:
                call = await bench.store.call(1)
                call.succeed()
                while flight.outcome is None:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
                await flight  # a checkpoint, even if there is nothing to wait for
        assert scope.cancelled_caught


async def test_whoever_leads_fifteen_times_in_a_row(open_bench: Any) -> None:
    """Hazard H6: the load goes on under each of them, and the survivor gets it."""
    async with open_bench() as bench:
        callers = [await bench.caller(["k"]) for _ in range(16)]
        for caller in callers[:-1]:
            caller.cancel()
            await caller.ended()
        bench.store.calls[0].succeed()
        assert (await callers[-1].ended()).values == {"k": ("k", 1)}
        assert bench.store.asked == [("k",)]


async def test_new_leader_after_a_hand_over(open_bench: Any) -> None:
    async with open_bench() as bench:
        await bench.caller(["k"])
        second, third = await bench.caller(["k"]), await bench.caller(["k"])
        (await bench.store.call(1)).fail()
        call = await bench.store.call(2)
        second.cancel()
        await second.ended()
        call.succeed()
        assert (await third.ended()).values == {"k": ("k", 2)}


async def test_caller_while_its_fallback_runs(open_bench: Any) -> None:
    begun = anyio.Event()

    async def fallback(keys: Any) -> Any:
        begun.set()
        await anyio.sleep_forever()

    async with open_bench(fallback=fallback) as bench:
        caller = await bench.caller(["k"])
        (await bench.store.call(1)).fail()
        await begun.wait()
        caller.cancel()
        assert (await caller.ended()).cancelled


async def test_loader_from_inside_by_something_it_awaited(open_bench: Any, anyio_backend: Any) -> None:
    """A stray cancellation is a failed load, not the end of the group or of a caller."""
    if anyio_backend[0] == "trio":
        pytest.skip("trio has no cancellation outside a scope")
    async with open_bench() as bench:
        leader, follower = await bench.caller(["k"]), await bench.caller(["k"])
        (await bench.store.call(1)).fail(anyio.get_cancelled_exc_class()())
        (await bench.store.call(2)).succeed()
        assert isinstance((await leader.ended()).error, LoadFailed)
        assert (await follower.ended()).values == {"k": ("k", 2)}


async def test_group_while_callers_elsewhere_wait(start: Any, store_class: Any, quiet: Any) -> None:
    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with flights:
                callers = [await start(tasks, flights, ["k"]) for _ in range(3)]
                call = await store.call(1)
                scope.cancel()
                await anyio.sleep_forever()
        errors = [(await caller.ended()).error for caller in callers]
    assert scope.cancelled_caught
    assert call.state == "cancelled"
    assert len(store.calls) == 1  # no hand-over to a load that would be cancelled too
    assert {type(error) for error in errors} == {FlightReset}
    assert len({id(error) for error in errors}) == 3
    quiet(flights)


async def test_group_while_it_is_being_left(start: Any, store_class: Any, quiet: Any) -> None:
    async def cancel_soon() -> None:
        await anyio.wait_all_tasks_blocked()
        scope.cancel()

    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with flights:
                caller = await start(tasks, flights, ["k"])
                call = await store.call(1)
                tasks.start_soon(cancel_soon)
        assert scope.cancelled_caught
        assert call.state == "cancelled"
        assert isinstance((await caller.ended()).error, FlightReset)
    quiet(flights)


async def test_group_while_its_host_is_busy_cleaning_up(start: Any, store_class: Any, quiet: Any) -> None:
    """Callers elsewhere are told by the cancelled loads; they need not wait for the host to come round."""
    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with flights:
                callers = [await start(tasks, flights, [key]) for key in "aab"]
                await store.call(2)
                scope.cancel()
                with anyio.CancelScope(shield=True), anyio.fail_after(10):
                    errors = [(await caller.ended()).error for caller in callers]
    assert {type(error) for error in errors} == {FlightReset}
    quiet(flights)
