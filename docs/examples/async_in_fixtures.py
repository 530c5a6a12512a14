"""Where a FlightGroup can live: a test, a fixture, an app's lifespan, a container. Each is a test of itself.

    python -m pytest docs/examples/async_in_fixtures.py

A group is entered and left by one task. The two halves of a pytest-asyncio fixture run in two tasks, so a
fixture keeps the group in a task of its own: `in_own_task`. Lifespans and exit stacks need no such care.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from singleflight.aio import FlightGroup


async def fetch(keys: Sequence[str]) -> dict[str, str]:
    await asyncio.sleep(0.01)
    return {key: key.upper() for key in keys}


@contextlib.asynccontextmanager
async def in_own_task(group: FlightGroup[str, str]) -> AsyncIterator[FlightGroup[str, str]]:
    """The group, entered and left by one task, whichever tasks enter and leave this."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def host() -> None:
        async with group:
            entered.set()
            await leave.wait()

    task = asyncio.create_task(host())
    task.add_done_callback(lambda _: entered.set())  # entering has failed
    try:
        await entered.wait()
        if task.done():
            task.result()
        yield group
    finally:
        leave.set()
        await task


# -- pytest-asyncio ----------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def flights() -> AsyncIterator[FlightGroup[str, str]]:
    async with in_own_task(FlightGroup(fetch)) as group:
        yield group


@pytest.mark.asyncio
async def test_a_group_from_a_fixture(flights: FlightGroup[str, str]) -> None:
    one, two = await asyncio.gather(flights.load(["k"]), flights.load(["k", "j"]))
    assert (one, two) == ({"k": "K"}, {"k": "K", "j": "J"})
    assert flights.snapshot()["flights"] == 2


@pytest.mark.asyncio
async def test_a_group_of_the_tests_own() -> None:
    async with FlightGroup(fetch) as group:
        assert await group.load(["k"]) == {"k": "K"}


# -- FastAPI, Starlette ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, FlightGroup[str, str]]]:
    async with FlightGroup(fetch) as group:
        yield {"flights": group}  # request.state.flights


app = FastAPI(lifespan=lifespan)


@app.get("/blocks/{key}")
async def block(key: str, request: Request) -> str:
    values: dict[str, str] = await request.state.flights.load([key])
    return values[key]


def test_a_group_in_a_lifespan() -> None:
    with TestClient(app) as client:
        assert client.get("/blocks/k").json() == "K"


# -- a container ------------------------------------------------------------------------------------------


class Services:
    """What a program opens once: `async with Services() as services`, in the task that also leaves it."""

    flights: FlightGroup[str, str]

    async def __aenter__(self) -> Services:
        async with contextlib.AsyncExitStack() as stack:
            self.flights = await stack.enter_async_context(FlightGroup(fetch))
            # … further services; if one cannot be opened, those before it are closed again.
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stack.__aexit__(*error)


@pytest.mark.asyncio
async def test_a_group_in_a_container() -> None:
    async with Services() as services:
        assert await services.flights.load(["k"]) == {"k": "K"}


@pytest.mark.asyncio
async def test_a_container_that_another_task_closes() -> None:
    async with contextlib.AsyncExitStack() as stack:
        flights = await stack.enter_async_context(in_own_task(FlightGroup(fetch)))
        assert await flights.load(["k"]) == {"k": "K"}
        await asyncio.create_task(stack.pop_all().aclose())
