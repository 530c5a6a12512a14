"""A group lives in one event loop, and one task enters and leaves it; whoever strays is told at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from singleflight.aio import FlightGroup, FlightReset

pytestmark = pytest.mark.anyio

ANOTHER_LOOP = "belongs to the event loop that it was entered in"
FOR_EVER = 1e9


def in_a_thread(what: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `what` returns or raises in a thread without an event loop."""
    result: list[Any] = [None, None]

    def run() -> None:
        try:
            result[0] = what()
        except BaseException as error:
            result[1] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return result[0], result[1]


@pytest.mark.parametrize("there", ["asyncio", "trio"])
async def test_a_caller_in_another_event_loop_is_told_at_once(open_bench: Any, there: str) -> None:
    """Case 14: it would wait for a future that nobody in its loop resolves, until its deadline."""
    async with open_bench() as bench:

        async def elsewhere() -> None:
            await bench.flights.load(["k"], deadline=FOR_EVER)

        here = await bench.caller(["k"])
        _, error = await anyio.to_thread.run_sync(in_a_thread, lambda: anyio.run(elsewhere, backend=there))
        assert type(error) is RuntimeError
        assert ANOTHER_LOOP in str(error)
        (await bench.store.call(1)).succeed()
        assert (await here.ended()).values == {"k": ("k", 1)}
        assert bench.counts["attached"] == 0


async def test_a_reset_from_a_thread_is_refused_and_a_snapshot_is_not(open_bench: Any) -> None:
    async with open_bench() as bench:
        caller = await bench.caller(["k"])
        _, error = await anyio.to_thread.run_sync(in_a_thread, bench.flights.reset)
        assert type(error) is RuntimeError
        assert ANOTHER_LOOP in str(error)
        counts, error = await anyio.to_thread.run_sync(in_a_thread, bench.flights.snapshot)
        assert (counts["loading"], error) == (1, None)
        (await bench.store.call(1)).succeed()
        await caller.ended()
        assert len(bench.store.calls) == 1


async def test_a_worker_thread_calls_through_the_groups_loop(open_bench: Any) -> None:
    """The way that the error names."""
    async with open_bench() as bench:

        def work() -> Any:
            return anyio.from_thread.run(bench.flights.load, ["k"])

        async def succeed() -> None:
            (await bench.store.call(1)).succeed()

        bench.tasks.start_soon(succeed)
        assert await anyio.to_thread.run_sync(work) == {"k": ("k", 1)}


async def test_an_entered_flight_is_awaited_and_left_in_its_own_loop(open_bench: Any) -> None:
    async with open_bench() as bench, bench.flights.join(["k"]) as flight:

        async def await_it() -> None:
            await flight

        async def leave_it() -> None:
            await flight.__aexit__(None, None, None)

        for stray in await_it, leave_it:
            _, error = await anyio.to_thread.run_sync(in_a_thread, lambda stray=stray: anyio.run(stray))
            assert type(error) is RuntimeError
            assert ANOTHER_LOOP in str(error)
        (await bench.store.call(1)).succeed()
        assert await flight == {"k": ("k", 1)}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_group_that_outlives_its_event_loop_tells_the_next_one(store_class: Any, backend: str) -> None:
    """As a module-level group in a notebook, or in tests that make a loop each."""
    groups: list[FlightGroup[Any, Any]] = []

    async def first() -> None:
        groups.append(FlightGroup(store_class().load))
        async with groups[0]:
            pass

    async def entered_and_never_left() -> None:
        groups.append(FlightGroup(store_class().load))
        await groups[1].__aenter__()

    async def second(group: FlightGroup[Any, Any]) -> None:
        await group.load(["k"], deadline=FOR_EVER)

    anyio.run(first, backend=backend)
    with pytest.raises(RuntimeError, match="closed"):
        anyio.run(second, groups[0], backend=backend)
    asyncio.run(entered_and_never_left())
    with pytest.raises(RuntimeError, match=ANOTHER_LOOP):
        anyio.run(second, groups[1], backend=backend)


async def in_another_task(what: Callable[[], Any]) -> BaseException | None:
    """What `what()` raises there, in a task of asyncio's own."""
    (error,) = await asyncio.gather(asyncio.create_task(what()), return_exceptions=True)
    return error if isinstance(error, BaseException) else None


@pytest.fixture
def only_asyncio(anyio_backend: Any) -> None:
    if anyio_backend[0] == "trio":
        pytest.skip("a nursery that is left open is trio's own error in the task that opened it")


@pytest.mark.usefixtures("only_asyncio")
async def test_a_group_left_in_another_task_says_so_and_ends_its_loads(
    store_class: Any, start: Any, quiet: Any
) -> None:
    """Case 13. As in a fixture of pytest-asyncio, whose halves run in two tasks."""
    store = store_class()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load, keep_running=True)

    async def leave() -> None:
        await flights.__aexit__(None, None, None)

    assert await in_another_task(flights.__aenter__) is None
    async with anyio.create_task_group() as tasks:
        caller = await start(tasks, flights, ["k"], deadline=FOR_EVER)
        call = await store.call(1)
        error = await in_another_task(leave)
        assert type(error) is RuntimeError
        assert "is left by the task that entered it" in str(error)
        assert "docs/aio.md" in str(error)
        assert call.state == "cancelled"
        assert isinstance((await caller.ended()).error, FlightReset)
    with pytest.raises(RuntimeError, match="closed"):
        await flights.load(["k"])
    quiet(flights)


@pytest.mark.usefixtures("only_asyncio")
async def test_a_loader_that_is_slow_to_stop_has_stopped_when_a_group_is_left_in_another_task() -> None:
    """Or it would use what its caller closes next."""
    begun = anyio.Event()
    stopped = False

    async def loader(keys: Any) -> Any:
        nonlocal stopped
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.02)
            stopped = True

    flights: FlightGroup[Any, Any] = FlightGroup(loader)
    assert await in_another_task(flights.__aenter__) is None
    async with flights.join(["k"]):
        await begun.wait()
        with pytest.raises(RuntimeError, match="left by the task"):
            await flights.__aexit__(None, None, None)
        assert stopped


@pytest.mark.usefixtures("only_asyncio")
async def test_the_bodys_error_is_shown_beside_ours(store_class: Any) -> None:
    flights: FlightGroup[Any, Any] = FlightGroup(store_class().load)
    assert await in_another_task(flights.__aenter__) is None
    with pytest.raises(RuntimeError, match="left by the task") as caught:
        try:
            raise LookupError("mine")
        except LookupError as mine:
            await flights.__aexit__(LookupError, mine, None)
    assert isinstance(caught.value.__context__, LookupError)


@pytest.mark.usefixtures("only_asyncio")
async def test_a_cancellation_goes_on_though_the_group_is_left_in_another_task(store_class: Any) -> None:
    flights: FlightGroup[Any, Any] = FlightGroup(store_class().load)
    assert await in_another_task(flights.__aenter__) is None
    cancelled = asyncio.CancelledError()
    assert not await flights.__aexit__(type(cancelled), cancelled, None)
    assert "is left by the task that entered it" in cancelled.__notes__[0]


async def test_the_sentence_is_the_same_on_trio(store_class: Any, anyio_backend: Any) -> None:
    """What trio says of the open nursery comes beside it."""
    if anyio_backend[0] != "trio":
        pytest.skip("the other event loops have tests of their own")
    said: list[str] = []

    def one_run() -> None:
        async def main() -> None:
            flights: FlightGroup[Any, Any] = FlightGroup(store_class().load)

            async def leave() -> None:
                try:
                    await flights.__aexit__(None, None, None)
                except RuntimeError as error:
                    said.append(str(error))

            async with anyio.create_task_group() as tasks:
                await flights.__aenter__()
                tasks.start_soon(leave)
                await anyio.wait_all_tasks_blocked()

        anyio.run(main, backend="trio")

    await anyio.to_thread.run_sync(in_a_thread, one_run)
    assert len(said) == 1
    assert "is left by the task that entered it" in said[0]
