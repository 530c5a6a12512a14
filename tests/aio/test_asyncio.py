"""What only asyncio has: native cancellation, wait_for, gather, threads, and a loop that blocks."""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from blockbuster import BlockingError

from singleflight.aio import FlightGroup, FlightReset, LoadFailed

pytestmark = pytest.mark.asyncio


async def joined(flights: FlightGroup[Any, Any], keys: Any) -> asyncio.Task[Any]:
    """A task that waits for its flight. (A new task runs up to its first wait in one turn of the loop.)"""
    task = asyncio.create_task(flights.load(keys))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_gather_shares(open_bench: Any) -> None:
    async with open_bench() as bench:
        together = asyncio.gather(*(bench.flights.load(["k"]) for _ in range(10)))
        (await bench.store.call(1)).succeed()
        assert await together == [{"k": ("k", 1)}] * 10
        assert len(bench.store.calls) == 1


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "follower"])
async def test_a_natively_cancelled_caller_takes_nobody_along(open_bench: Any, who: int) -> None:
    async with open_bench() as bench:
        tasks = [await joined(bench.flights, ["k"]) for _ in range(3)]
        call = await bench.store.call(1)
        tasks.pop(who).cancel()
        await asyncio.sleep(0)
        call.succeed()
        assert await asyncio.gather(*tasks) == [{"k": ("k", 1)}] * 2


async def test_wait_for_is_a_deadline_of_the_callers_own(open_bench: Any) -> None:
    async with open_bench() as bench:
        other = await joined(bench.flights, ["k"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.flights.load(["k"]), 0.001)
        bench.store.calls[0].succeed()
        assert await other == {"k": ("k", 1)}


async def test_a_caller_cancelled_in_the_turn_in_which_its_flight_lands(open_bench: Any) -> None:
    async with open_bench() as bench:
        task = await joined(bench.flights, ["k"])
        call = await bench.store.call(1)
        call.succeed()
        while bench.counts["landed"] == 0:
            await asyncio.sleep(0)
        task.cancel()
        assert isinstance(
            (await asyncio.gather(task, return_exceptions=True))[0], (dict, asyncio.CancelledError)
        )


async def test_ten_thousand_followers_come_and_go(open_bench: Any) -> None:
    """Hazard H7: nothing accumulates on a long flight, and nobody else is disturbed."""
    async with open_bench() as bench:
        leader = await joined(bench.flights, ["k"])
        followers = [asyncio.create_task(bench.flights.load(["k"])) for _ in range(10_000)]
        await asyncio.sleep(0)
        flight, _ = bench.flights._table.find("k")
        assert flight.fan_in == 10_001
        for follower in reversed(followers[1:]):
            follower.cancel()
        await asyncio.wait(followers[1:])
        assert len(flight.followers) == 1
        bench.store.calls[0].succeed()
        assert await leader == await followers[0] == {"k": ("k", 1)}
        assert bench.counts["cancelled"] == 9_999


async def test_callers_whose_errors_nobody_retrieves_are_the_only_ones_to_complain(open_bench: Any) -> None:
    """The bench fails on any "exception was never retrieved"; here all callers are cancelled and dropped."""
    async with open_bench() as bench:
        tasks = [await joined(bench.flights, ["k"]) for _ in range(3)]
        call = await bench.store.call(1)
        for task in tasks:
            task.cancel()
        call.fail()
        await asyncio.wait(tasks)


async def test_the_hosts_task_cancelled_natively(store_class: Any, quiet: Any) -> None:
    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load)
    entered = asyncio.Event()

    async def host() -> None:
        async with flights:
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(host())
    await entered.wait()
    caller = await joined(flights, ["k"])
    await store.call(1)
    task.cancel()
    with pytest.raises(FlightReset):
        await caller
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.calls[0].state == "cancelled"
    quiet(flights)


async def test_a_cancelled_loader_task_is_a_failed_load(open_bench: Any) -> None:
    """As when something cancels every task it can find."""
    async with open_bench() as bench:
        before = asyncio.all_tasks()
        async with bench.flights.join(["k"]) as flight:
            await bench.store.call(1)
            (loader,) = asyncio.all_tasks() - before
            loader.cancel()
            with pytest.raises(LoadFailed):
                await flight


async def test_a_loader_in_a_worker_thread_does_not_block_the_loop(quiet: Any) -> None:
    may_return = threading.Event()

    async def loader(keys: Any) -> Any:
        await asyncio.to_thread(may_return.wait)
        return {key: key for key in keys}

    async with FlightGroup(loader) as flights:
        callers = [await joined(flights, ["k"]) for _ in range(3)]
        may_return.set()
        assert await asyncio.gather(*callers) == [{"k": "k"}] * 3
    quiet(flights)


async def test_a_loader_that_blocks_the_loop_is_caught(quiet: Any) -> None:
    """Proves that the fixture which guards every test of this folder can fail."""

    async def loader(keys: Any) -> Any:
        time.sleep(0.001)

    async with FlightGroup(loader) as flights:
        with pytest.raises(LoadFailed) as caught:
            await flights.load(["k"])
        assert isinstance(caught.value.__cause__, BlockingError)
    quiet(flights)


async def test_the_context_that_the_caller_runs_in_can_be_given_to_the_loader(quiet: Any) -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")
    context = copy_context()
    context.run(name.set, "service")

    async def loader(keys: Any) -> Any:
        return dict.fromkeys(keys, name.get())

    async def caller() -> Any:
        async with FlightGroup(loader, loader_context=context) as flights:
            values = await flights.load(["k"])
        quiet(flights)
        return values

    assert await asyncio.create_task(caller(), context=context) == {"k": "service"}
