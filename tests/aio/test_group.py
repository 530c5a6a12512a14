"""Entering, leaving and resetting a group."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from singleflight.aio import FlightGroup, FlightReset, Outcome, Policy, Reason

pytestmark = pytest.mark.anyio


async def test_leaving_waits_for_what_somebody_waits_for(start: Any, store_class: Any, quiet: Any) -> None:
    async def land_later(call: Any) -> None:
        await anyio.wait_all_tasks_blocked()
        call.succeed()

    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load)
    async with anyio.create_task_group() as tasks:
        async with flights:
            caller = await start(tasks, flights, ["k"])
            tasks.start_soon(land_later, await store.call(1))
        assert store.calls[0].state == "returned"
    assert caller.values == {"k": ("k", 1)}
    quiet(flights)


async def test_leaving_ends_a_load_that_only_keeps_running(store_class: Any, quiet: Any) -> None:
    store = store_class()
    async with FlightGroup(store.load, keep_running=True) as flights, flights.join(["k"]):
        call = await store.call(1)
    assert call.state == "cancelled"
    quiet(flights)


async def test_an_exception_in_the_block_comes_out_as_it_was_raised(store_class: Any, quiet: Any) -> None:
    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load)
    with pytest.raises(LookupError, match="mine"):
        async with flights, flights.join(["k"]):
            call = await store.call(1)
            raise LookupError("mine")
    assert call.state == "cancelled"
    quiet(flights)


async def test_callers_elsewhere_are_told_why_the_group_ended(start: Any, store_class: Any) -> None:
    flights: FlightGroup[Any, Any] = FlightGroup(store_class().load)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(LookupError):
            async with flights:
                caller = await start(tasks, flights, ["k"])
                raise LookupError("mine")
    assert isinstance(caller.error, FlightReset)
    assert isinstance(caller.error.__cause__, LookupError)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_joining_needs_an_open_group(store_class: Any, when: str) -> None:
    flights: FlightGroup[Any, Any] = FlightGroup(store_class().load)
    if when == "after":
        async with flights:
            pass
    with pytest.raises(RuntimeError, match="not entered" if when == "before" else "closed"):
        await flights.load(["k"])
    with pytest.raises(RuntimeError, match="not entered" if when == "before" else "closed"):
        flights.reset()


async def test_a_flight_that_could_not_be_joined_says_so_and_may_be_joined_later(store_class: Any) -> None:
    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load)
    flight = flights.join(["k"])
    with pytest.raises(RuntimeError, match="not entered"):
        await flight.__aenter__()
    with pytest.raises(RuntimeError, match="inside its `async with` block"):
        await flight
    async with flights, flight:
        (await store.call(1)).succeed()
        assert await flight == {"k": ("k", 1)}


async def test_a_group_is_entered_once(store_class: Any) -> None:
    async with FlightGroup(store_class().load) as flights:
        with pytest.raises(RuntimeError, match="entered once"):
            await flights.__aenter__()


async def test_reset_hands_everybody_to_a_new_load_and_stops_the_old_one(open_bench: Any) -> None:
    async with open_bench() as bench:
        callers = [await bench.caller(["k"]) for _ in range(3)]
        old = await bench.store.call(1)
        bench.flights.reset()
        await old.over()
        assert old.state == "cancelled"
        (await bench.store.call(2)).succeed()
        for caller in callers:
            assert (await caller.ended()).values == {"k": ("k", 2)}
        assert len(bench.store.calls) == 2


async def test_a_load_that_ignores_its_cancellation_is_not_given_out_after_a_reset(quiet: Any) -> None:
    runs = 0
    first_begun, first_may_return = anyio.Event(), anyio.Event()

    async def loader(keys: Any) -> Any:
        nonlocal runs
        runs += 1
        version = runs
        if version == 1:
            with anyio.CancelScope(shield=True):
                first_begun.set()
                await first_may_return.wait()
        return dict.fromkeys(keys, version)

    async with FlightGroup(loader) as flights, flights.join(["k"]) as flight:
        await first_begun.wait()
        flights.reset()
        first_may_return.set()
        assert await flight == {"k": 2}
    quiet(flights)


async def test_resets_are_hand_overs_and_bounded(open_bench: Any) -> None:
    async with open_bench(policy=Policy(max_handovers=1)) as bench:
        leader, follower = await bench.caller(["k"]), await bench.caller(["k"])
        await bench.store.call(1)
        bench.flights.reset()
        await bench.store.call(2)
        bench.flights.reset()
        for caller in leader, follower:
            assert isinstance((await caller.ended()).error, FlightReset)
            assert (caller.flight.outcome, caller.flight.reason) == (Outcome.FELL_BACK, Reason.RESET)
        assert len(bench.store.calls) == 2


async def test_reset_leaves_what_has_landed(open_bench: Any) -> None:
    async with open_bench() as bench:
        await bench.caller(["a"])
        caller = await bench.caller(["a", "b"])
        (await bench.store.call(1)).succeed()
        while not caller.flight.landed:
            await anyio.lowlevel.checkpoint()
        await bench.store.call(2)
        bench.flights.reset()
        (await bench.store.call(3)).succeed()
        assert (await caller.ended()).values == {"a": ("a", 1), "b": ("b", 3)}


async def test_reset_of_an_unshared_load(open_bench: Any) -> None:
    async with open_bench(policy=Policy(max_blocks=1)) as bench:
        caller = await bench.caller(["a", "b"])
        old = await bench.store.call(1)
        bench.flights.reset()
        await old.over()
        (await bench.store.call(2)).succeed()
        assert (await caller.ended()).values == {"a": ("a", 2), "b": ("b", 2)}


async def test_snapshot_is_json_and_adds_up(open_bench: Any) -> None:
    async with open_bench() as bench:
        leader = await bench.caller(["a", "b"])
        followers = [await bench.caller(["a", "b"]) for _ in range(3)]
        now = json.loads(json.dumps(bench.counts))
        assert (now["loading"], now["pending"], now["attached"]) == (1, 2, 3)
        followers[0].cancel()
        await followers[0].ended()
        (await bench.store.call(1)).succeed()
        await leader.ended()
        after = bench.counts
        assert (after["loading"], after["pending"], after["ready"], after["cancelled"]) == (0, 0, 2, 1)
        assert (after["blocks_led"], after["blocks_adopted"]) == (2, 6)


async def test_repr_says_what_is_going_on(open_bench: Any) -> None:
    async with open_bench() as bench:
        caller = await bench.caller(["a", "b"])
        assert repr(bench.flights) == "<FlightGroup open loads=[<Load #1 keys=2>] pending=2>"
        assert repr(caller.flight) == "<FlightHandle keys=2 undecided>"
        (await bench.store.call(1)).succeed()
        await caller.ended()
        assert repr(caller.flight) == "<FlightHandle keys=2 ready>"
