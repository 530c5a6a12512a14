"""Callers, loads, cancellations and resets in every order that hypothesis can think of, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from singleflight.aio import FlightGroup, FlightReset, LoadFailed, Outcome, Policy


async def steps(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@dataclass(frozen=True)
class CallerPlan:
    arrives: int
    keys: tuple[str, ...]
    leaves: int | None  # steps after it has joined; None: it stays to the end


@dataclass(frozen=True)
class LoadPlan:
    takes: int
    works: bool


@dataclass(frozen=True)
class Plan:
    callers: list[CallerPlan]
    loads: list[LoadPlan]  # used in turn, over and over
    resets: list[int]
    handovers: int
    keep_running: bool
    max_blocks: int


PLANS = st.builds(
    Plan,
    callers=st.lists(
        st.builds(
            CallerPlan,
            arrives=st.integers(0, 8),
            keys=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True).map(tuple),
            leaves=st.none() | st.integers(0, 8),
        ),
        min_size=1,
        max_size=6,
    ),
    loads=st.lists(st.builds(LoadPlan, takes=st.integers(0, 6), works=st.booleans()), min_size=1, max_size=5),
    resets=st.lists(st.integers(0, 12), max_size=2),
    handovers=st.integers(0, 2),
    keep_running=st.booleans(),
    max_blocks=st.sampled_from([2, 100]),
)


@dataclass
class World:
    plan: Plan
    began: list[tuple[str, ...]] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    endings: list[str] = field(default_factory=list)

    async def load(self, keys: Sequence[str]) -> dict[str, tuple[str, int]]:
        number = len(self.began)
        self.began.append(tuple(keys))
        # Nobody joins or repeats what is under way: what runs, and is wanted, has no key in common.
        shared = [
            key for load in self.flights._driver.running if load.flight is not None for key in load.keys
        ]
        assert len(shared) == len(set(shared)), shared
        assert len(self.flights._table) <= self.plan.max_blocks
        plan = self.plan.loads[number % len(self.plan.loads)]
        await steps(plan.takes)
        if not plan.works:
            self.failed.update(keys)
            raise ConnectionError(number)
        self.returned.add(number)
        return {key: (key, number) for key in keys}

    async def caller(self, plan: CallerPlan) -> None:
        await steps(plan.arrives)
        flight = self.flights.join(plan.keys, deadline=3600)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                if plan.leaves is not None:
                    tasks.start_soon(self.cancel_after, plan.leaves, scope)
                ending = await self.wait_for(flight, plan)
                tasks.cancel_scope.cancel()
        if scope.cancelled_caught:
            assert plan.leaves is not None
            ending = "cancelled"
        self.endings.append(ending)

    async def wait_for(self, flight: Any, plan: CallerPlan) -> str:
        try:
            async with flight:
                values = await flight
        except LoadFailed as error:
            return "failed" if self.failed & set(plan.keys) else f"failed by {error.__cause__!r}"
        except FlightReset:
            assert self.plan.resets
            return "reset"
        assert flight.outcome is Outcome.READY
        assert list(values) == list(plan.keys)
        for key, (of, number) in values.items():
            assert of == key
            assert number in self.returned
            assert key in self.began[number]
        return "values"

    async def cancel_after(self, count: int, scope: anyio.CancelScope) -> None:
        await steps(count)
        scope.cancel()

    async def reset_after(self, count: int) -> None:
        await steps(count)
        self.flights.reset()

    async def run(self) -> None:
        plan = self.plan
        policy = Policy(max_handovers=plan.handovers, max_blocks=plan.max_blocks)
        self.flights: FlightGroup[str, Any] = FlightGroup(
            self.load, policy=policy, keep_running=plan.keep_running
        )
        with anyio.fail_after(20):
            async with self.flights, anyio.create_task_group() as tasks:
                for caller in plan.callers:
                    tasks.start_soon(self.caller, caller)
                for count in plan.resets:
                    tasks.start_soon(self.reset_after, count)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLANS)
def test_every_interleaving_ends_each_caller_once_and_leaves_nothing(
    quiet: Any, backend: str, plan: Plan
) -> None:
    world = World(plan)
    anyio.run(world.run, backend=backend)
    quiet(world.flights)
    assert len(world.endings) == len(plan.callers)
    assert {*world.endings} <= {"values", "failed", "reset", "cancelled"}
    for ending in set(world.endings):
        event(ending)
    # Never a stampede: a caller starts a load when it arrives, and at most one more for each hand-over.
    assert len(world.began) <= len(plan.callers) * (1 + plan.handovers)
    if not plan.resets and all(load.works for load in plan.loads):
        assert {*world.endings} <= {"values", "cancelled"}
