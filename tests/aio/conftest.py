"""A scripted loader, callers whose every moment a test can wait for, and a check that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import sniffio
from anyio.abc import TaskGroup
from blockbuster import blockbuster_ctx

from singleflight.aio import FlightGroup, FlightHandle

BACKENDS = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    both = [
        item.nodeid
        for item in items
        if item.get_closest_marker("anyio") and item.get_closest_marker("asyncio")
    ]
    if both:
        raise pytest.UsageError(f"one plugin to a test, anyio's or pytest-asyncio's: {both}")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(60))  # a lost wake-up is a failure, not a hang


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A blocking call in an asyncio event loop raises BlockingError."""
    with blockbuster_ctx():
        yield


class Call:
    """One run of the loader, held until the test decides how it ends."""

    def __init__(self, number: int, keys: tuple[Any, ...]) -> None:
        self.number = number
        self.keys = keys
        self.state = "running"
        self._decided = anyio.Event()
        self._error: BaseException | None = None
        self._over = anyio.Event()

    def succeed(self) -> None:
        self._decided.set()

    def fail(self, error: BaseException | None = None) -> None:
        self._error = error or ConnectionError(f"store down, call {self.number}")
        self._decided.set()

    async def over(self) -> None:
        await self._over.wait()

    async def run(self) -> dict[Any, tuple[Any, int]]:
        try:
            await self._decided.wait()
            if self._error is not None:
                self.state = "raised"
                raise self._error
            self.state = "returned"
        except anyio.get_cancelled_exc_class():
            self.state = "cancelled"
            raise
        finally:
            self._over.set()
        return {key: (key, self.number) for key in self.keys}


class Store:
    """A loader whose calls the test ends one by one; a value is (key, number of the call that brought it)."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._news = anyio.Event()

    async def load(self, keys: Sequence[Any]) -> dict[Any, Any]:
        call = Call(len(self.calls) + 1, tuple(keys))
        self.calls.append(call)
        self._news.set()
        self._news = anyio.Event()
        return await call.run()

    async def call(self, number: int) -> Call:
        """Wait until the loader has been called that often."""
        while len(self.calls) < number:
            await self._news.wait()
        return self.calls[number - 1]

    @property
    def asked(self) -> list[tuple[Any, ...]]:
        return [call.keys for call in self.calls]


class Caller:
    """A task that joins, waits and records how that ended."""

    def __init__(self, flights: FlightGroup[Any, Any], keys: Sequence[Hashable], **options: Any) -> None:
        self.values: dict[Any, Any] | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.flight: FlightHandle[Any, Any] = flights.join(keys, **options)
        self.ended_at: float | None = None
        self._scope = anyio.CancelScope()
        self._joined = anyio.Event()
        self._ended = anyio.Event()

    async def run(self) -> None:
        try:
            with self._scope:
                async with self.flight:
                    self._joined.set()
                    self.values = await self.flight
        except Exception as error:
            self.error = error
        finally:
            self.cancelled = self._scope.cancelled_caught
            self.ended_at = anyio.current_time()
            self._ended.set()

    def cancel(self) -> None:
        self._scope.cancel()

    async def ended(self) -> Caller:
        await self._ended.wait()
        return self

    @property
    def waits(self) -> bool:
        return not self._ended.is_set()


async def started(
    tasks: TaskGroup, flights: FlightGroup[Any, Any], keys: Sequence[Hashable], **options: Any
) -> Caller:
    caller = Caller(flights, keys, **options)
    tasks.start_soon(caller.run)
    await caller._joined.wait()
    return caller


class Bench:
    """What a test works with: a store, a group on it, and callers in a task group of their own."""

    def __init__(self, store: Store, flights: FlightGroup[Any, Any], tasks: TaskGroup) -> None:
        self.store = store
        self.flights = flights
        self.tasks = tasks

    async def caller(self, keys: Sequence[Hashable], **options: Any) -> Caller:
        """A caller that has joined and waits. (Nothing yields between joining and waiting.)"""
        return await started(self.tasks, self.flights, keys, **options)

    @property
    def counts(self) -> dict[str, Any]:
        return self.flights.snapshot()


def assert_quiet(flights: FlightGroup[Any, Any]) -> None:
    """Nothing is pending, and every attachment has ended by exactly one outcome."""
    assert repr(flights._table) == "<PendingBlockTable blocks=0 flights=[] members=[]>"
    assert flights._driver._budgets._loads == {}  # they would keep the values
    counts = flights.snapshot()
    assert (counts["loading"], counts["pending"]) == (0, 0)
    assert counts["attached"] == counts["ready"] + counts["cancelled"] + sum(counts["fell_back"].values())
    assert counts["flights"] == counts["landed"] + counts["failed"]


@contextlib.asynccontextmanager
async def opened(give_up_s: float = 10, **options: Any) -> AsyncIterator[Bench]:
    """A group on a scripted store; afterwards no task, no unretrieved exception, nothing in the table.

    A test that waits for what never comes ends after `give_up_s` seconds, as a failure.
    """
    complaints: list[Any] = []
    if sniffio.current_async_library() == "asyncio":
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    before = {task.id for task in anyio.get_running_tasks()}
    store = Store()
    flights: FlightGroup[Any, Any] = FlightGroup(store.load, **options)
    try:
        with anyio.fail_after(give_up_s):
            async with anyio.create_task_group() as tasks, flights:
                yield Bench(store, flights, tasks)
    finally:
        assert_quiet(flights)
        assert {task.id for task in anyio.get_running_tasks()} <= before
        gc.collect()
        assert complaints == []


@pytest.fixture
def open_bench() -> Any:
    """`async with open_bench(**FlightGroup options) as bench:`"""
    return opened


@pytest.fixture
def start() -> Any:
    """`caller = await start(tasks, flights, keys)`, for tests that end the group while callers wait."""
    return started


@pytest.fixture
def quiet() -> Any:
    return assert_quiet


@pytest.fixture
def store_class() -> type[Store]:
    return Store
