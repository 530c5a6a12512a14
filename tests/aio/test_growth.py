"""The cost of a waiter does not depend on how many there are: counted in Python calls, not in seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from singleflight.aio import FlightGroup, Policy

SMALL, LARGE = 50, 400


def calls_for(waiters: int, end: Callable[[Any], None], policy: Policy) -> int:
    """Python calls from when `waiters` callers wait for one flight until all are gone."""
    count = 0

    def counted(frame: Any, what: str, arg: Any) -> None:
        nonlocal count
        count += what == "call"

    async def main() -> None:
        gate = anyio.Event()
        fail_first = [True]

        async def loader(keys: Any) -> Any:
            await gate.wait()
            if fail_first.pop(0) if fail_first else False:
                raise ConnectionError
            return {key: key for key in keys}

        async def caller(joined: anyio.Event) -> None:
            async with flights.join(["k"]) as flight:
                joined.set()
                await flight

        async with FlightGroup(loader, policy=policy) as flights, anyio.create_task_group() as tasks:
            started = [anyio.Event() for _ in range(waiters)]
            scopes = [anyio.CancelScope() for _ in range(waiters)]

            async def in_scope(number: int) -> None:
                with scopes[number]:
                    try:
                        await caller(started[number])
                    except Exception:
                        return

            for number in range(waiters):
                tasks.start_soon(in_scope, number)
                await started[number].wait()
            if end is not FAIL:
                fail_first[:] = [False]
            sys.setprofile(counted)
            end((gate, scopes))
        sys.setprofile(None)

    try:
        anyio.run(main)
    finally:
        sys.setprofile(None)
    return count


def LAND(world: Any) -> None:
    world[0].set()


def FAIL(world: Any) -> None:
    world[0].set()


def CANCEL(world: Any) -> None:
    for scope in reversed(world[1]):  # the worst order for a list of waiters
        scope.cancel()


@pytest.mark.parametrize(
    ("end", "policy"),
    [(LAND, Policy()), (FAIL, Policy()), (FAIL, Policy(max_handovers=0)), (CANCEL, Policy())],
    ids=["land", "hand over", "fail", "cancel"],
)
def test_ending_n_waiters_is_linear(end: Any, policy: Policy) -> None:
    small, large = calls_for(SMALL, end, policy) / SMALL, calls_for(LARGE, end, policy) / LARGE
    assert large < 1.2 * small, (small, large)


def test_timing_out_n_waiters_is_linear() -> None:
    """Each at a time of its own: what would be a scan of all for each."""

    def per_waiter(waiters: int) -> float:
        count = 0

        def counted(frame: Any, what: str, arg: Any) -> None:
            nonlocal count
            count += what == "call"

        async def main() -> None:
            nonlocal count

            async def loader(keys: Any) -> Any:
                await anyio.sleep_forever()

            async def caller(number: int) -> None:
                with contextlib.suppress(TimeoutError):
                    await flights.load(["k"], deadline=1 + number)

            async with FlightGroup(loader) as flights, anyio.create_task_group() as tasks:
                for number in range(waiters):
                    tasks.start_soon(caller, number)
                await anyio.wait_all_tasks_blocked()
                sys.setprofile(counted)
            sys.setprofile(None)

        import trio.testing

        try:
            anyio.run(
                main, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)}
            )
        finally:
            sys.setprofile(None)
        return count / waiters

    assert per_waiter(LARGE) < 1.2 * per_waiter(SMALL)
