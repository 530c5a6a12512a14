"""Past the policy's budget nobody joins a load, whoever is there to notice.

Trio's clock jumps ahead to whatever is due next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import trio.testing
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from singleflight.aio import FlightError, FlightGroup, Policy
from singleflight.aio.budgets import SLACK, Budgets

pytestmark = pytest.mark.anyio

POLICY = Policy(deadline_base_s=10, deadline_per_block_s=0.5, max_handovers=1)


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture
def open_bench(open_bench: Any) -> Any:
    """The clock jumps to whatever is due next, so the limit of a hanging test must be far away."""
    return lambda **options: open_bench(give_up_s=1e6, **options)


@pytest.mark.parametrize("late_s", [0.0, 0.001, 50.0])
async def test_who_comes_after_the_budget_leads_though_a_patient_caller_keeps_the_hung_load(
    open_bench: Any, late_s: float
) -> None:
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        patient = await bench.caller(["k"], deadline=1000)
        await anyio.sleep_until(start + 10.5 + late_s)
        late = await bench.caller(["k"])
        (await bench.store.call(2)).succeed()
        assert (await late.ended()).values == {"k": ("k", 2)}
        assert late.ended_at == start + 10.5 + late_s
        bench.store.calls[0].succeed()
        assert (await patient.ended()).values == {"k": ("k", 1)}


async def test_who_comes_just_before_the_budget_still_joins(open_bench: Any) -> None:
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        await bench.caller(["k"], deadline=1000)
        await anyio.sleep_until(start + 10.499)
        late = await bench.caller(["k"])
        bench.store.calls[0].succeed()
        assert (await late.ended()).values == {"k": ("k", 1)}


async def test_a_hung_load_that_keeps_running_is_ended_at_its_budget_though_nobody_comes(
    open_bench: Any,
) -> None:
    async with open_bench(policy=POLICY, keep_running=True) as bench:
        start = anyio.current_time()
        caller = await bench.caller(["k"])
        await anyio.sleep(1)
        caller.cancel()
        call = await bench.store.call(1)
        await call.over()
        assert (call.state, anyio.current_time()) == ("cancelled", start + 10.5)
        assert (bench.counts["pending"], bench.counts["loading"], bench.counts["abandoned"]) == (0, 0, 1)


async def test_a_short_budget_that_begins_later_ends_first(open_bench: Any) -> None:
    async with open_bench(policy=POLICY, keep_running=True) as bench:
        start = anyio.current_time()
        for keys in (range(100, 120), ["small"], range(200, 204)):
            async with bench.flights.join(keys):
                await bench.store.call(len(bench.store.calls) + 1)
            await anyio.sleep(1)
        ends = {}
        for number in (2, 3, 1):
            await bench.store.calls[number - 1].over()
            ends[number] = anyio.current_time() - start
        assert ends == {2: 1 + 10.5, 3: 2 + 12, 1: 20}


async def test_a_hand_over_does_not_attach_to_a_load_past_its_budget(open_bench: Any) -> None:
    """Both end in the same turn of the loop: the budget of one load, and another load, which fails."""
    async with open_bench(policy=POLICY) as bench:
        start = anyio.current_time()
        await bench.caller(["hung"], deadline=1000)
        await anyio.sleep(5)
        await bench.caller(["broken"], deadline=1000)
        both = await bench.caller(["hung", "broken"], deadline=1000)
        await anyio.sleep_until(start + 10.5)
        (await bench.store.call(2)).fail()
        assert (await bench.store.call(3)).keys == ("hung", "broken")
        bench.store.calls[2].succeed()
        assert (await both.ended()).values == {"hung": ("hung", 3), "broken": ("broken", 3)}
        bench.store.calls[0].succeed()


def test_time_that_passed_while_the_loop_was_blocked_counts(quiet: Any) -> None:
    """Callers and failures that come before the timer's task has run: the clock is ahead of every task."""
    clock = trio.testing.MockClock()
    asked: list[tuple[str, ...]] = []
    begun, fails = trio.Event(), trio.Event()

    async def loader(keys: Any) -> Any:
        asked.append(keys)
        if keys == ("hung",):
            await anyio.sleep_forever()
        if keys == ("broken",):
            begun.set()
            await fails.wait()
            clock.jump(10.5)
            raise ConnectionError
        return dict.fromkeys(keys, "anew")

    async def main() -> None:
        flights: FlightGroup[str, str] = FlightGroup(loader, policy=POLICY)
        async with flights:
            async with flights.join(["hung"], deadline=1000):
                await anyio.wait_all_tasks_blocked()
                clock.jump(10.5)
                async with flights.join(["hung", "late"]) as late:
                    assert await late == {"hung": "anew", "late": "anew"}
            async with flights.join(["hung"], deadline=1000), flights.join(["broken"], deadline=1000):
                await begun.wait()
                async with flights.join(["hung", "broken"], deadline=1000) as both:
                    fails.set()
                    assert await both == {"hung": "anew", "broken": "anew"}
        quiet(flights)

    anyio.run(main, backend="trio", backend_options={"clock": clock})
    assert sorted(asked) == [("broken",), ("hung",), ("hung",), ("hung", "broken"), ("hung", "late")]


async def test_the_timer_does_not_hold_up_the_end_of_the_group(store_class: Any, quiet: Any) -> None:
    start = anyio.current_time()
    async with FlightGroup(store_class().load, policy=POLICY, keep_running=True) as flights:
        async with flights.join(["k"]):
            pass
        await anyio.sleep(1)
    assert anyio.current_time() == start + 1
    quiet(flights)


async def test_a_budget_that_has_grown_is_waited_for(open_bench: Any) -> None:
    policy = Policy(deadline_base_s=10, deadline_per_block_s=0, deadline_learned_factor=3)
    async with open_bench(policy=policy, keep_running=True) as bench:
        start = anyio.current_time()
        await bench.caller(["slow"], deadline=100)
        async with bench.flights.join(["hung"]):
            await bench.store.call(2)
        await anyio.sleep(8)
        next(call for call in bench.store.calls if call.keys == ("slow",)).succeed()
        hung = next(call for call in bench.store.calls if call.keys == ("hung",))
        await hung.over()
        assert anyio.current_time() - start == 3 * 8


async def test_one_timer_task_however_many_loads_hang(open_bench: Any) -> None:
    async with open_bench(policy=POLICY) as bench:
        before = len(anyio.get_running_tasks())
        for key in range(100):
            await bench.caller([key])
        assert len(anyio.get_running_tasks()) == before + 2 * 100  # a caller and its loader each


async def test_loads_that_end_in_time_neither_set_a_timer_each_nor_leave_anything() -> None:
    """10,000 loads of 10 ms in 100 s, with a budget of 10 s: the timer fires once a budget."""
    fired: list[float] = []
    budgets = Budgets()

    def end(now: float) -> None:
        fired.append(now)
        assert budgets.take_due(now) == []

    async with anyio.create_task_group() as tasks:
        timer = tasks.start_soon(budgets.run, end)
        for number in range(10_000):
            load: Any = SimpleNamespace(flight=SimpleNamespace(generation=number))
            budgets.add(load, anyio.current_time() + 10)
            await anyio.sleep(0.01)
            budgets.remove(load)
            assert len(budgets._ends) <= 1 + SLACK
        await anyio.sleep(20)
        assert len(fired) <= 100 / 10 + 1
        # Nothing is pending, so no timer is set.
        assert (budgets._ends, budgets._alarm.deadline) == ([], math.inf)
        timer.cancel()


@dataclass(frozen=True)
class Ask:
    at: int
    keys: tuple[str, ...]
    deadline: float | None
    leaves_after: int | None


ASKS = st.lists(
    st.builds(
        Ask,
        at=st.integers(0, 30),
        keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True).map(tuple),
        deadline=st.none() | st.sampled_from([1, 5, 11, 40, 1000]),
        leaves_after=st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=8,
)
TAKES = st.lists(
    st.tuples(st.sampled_from([1, 4, 9, 10, 11, 12, 30, math.inf]), st.booleans()), min_size=1, max_size=5
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asks=ASKS, takes=TAKES, keep_running=st.booleans())
def test_whatever_comes_and_goes_when_nobody_joins_past_a_budget_and_no_load_runs_past_it_for_nobody(
    quiet: Any, asks: list[Ask], takes: list[tuple[float, bool]], keep_running: bool
) -> None:
    policy = Policy(deadline_base_s=9, deadline_per_block_s=1)  # one key: 10 s
    began: list[tuple[float, int]] = []  # of each run of the loader: when, and how many keys
    ended: dict[int, float] = {}
    last_caller_left = 0.0

    async def loader(keys: Any) -> Any:
        number = len(began)
        began.append((anyio.current_time(), len(keys)))
        seconds, works = takes[number % len(takes)]
        try:
            await anyio.sleep(seconds)
        finally:
            ended[number] = anyio.current_time()
        if not works:
            raise ConnectionError
        return dict.fromkeys(keys, number)

    async def caller(ask: Ask) -> None:
        nonlocal last_caller_left
        await anyio.sleep_until(start + ask.at)
        joined = anyio.current_time()
        with anyio.move_on_after(math.inf if ask.leaves_after is None else ask.leaves_after):
            try:
                async with flights.join(ask.keys, deadline=ask.deadline) as flight:
                    values = await flight
            except FlightError:
                pass
            else:
                for number in values.values():
                    at, size = began[number]
                    assert joined < at + policy.budget_s(size)
        longest = 2 * policy.budget_s(len(ask.keys)) if ask.deadline is None else ask.deadline
        assert anyio.current_time() - joined <= longest
        last_caller_left = max(last_caller_left, anyio.current_time())

    async def main() -> None:
        nonlocal start
        start = anyio.current_time()
        async with flights:
            async with anyio.create_task_group() as tasks:
                for ask in asks:
                    tasks.start_soon(caller, ask)
            await anyio.sleep(100)  # nobody is left; time alone has to end what still runs
            assert flights.snapshot()["loading"] == 0

    start = 0.0
    flights: FlightGroup[str, int] = FlightGroup(loader, policy=policy, keep_running=keep_running)
    anyio.run(main, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)})
    quiet(flights)
    for number, at_end in ended.items():
        at, size = began[number]
        event("in time" if at_end < at + policy.budget_s(size) else "past its budget")
        assert at_end <= max(at + policy.budget_s(size) if keep_running else at, last_caller_left)


class TestOnRealClocks:
    """The same on every event loop; only that it happens, since a loaded machine may be late."""

    POLICY = Policy(deadline_base_s=0.05, deadline_per_block_s=0)

    @pytest.fixture(params=["asyncio", "uvloop", "trio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> Any:
        return {
            "asyncio": ("asyncio", {}),
            "uvloop": ("asyncio", {"use_uvloop": True}),
            "trio": ("trio", {}),
        }[request.param]

    async def test_a_hung_load_that_keeps_running_is_ended_by_time(self, open_bench: Any) -> None:
        async with open_bench(policy=self.POLICY, keep_running=True) as bench:
            start = anyio.current_time()
            async with bench.flights.join(["k"]):
                call = await bench.store.call(1)
            await call.over()
            assert call.state == "cancelled"
            assert anyio.current_time() - start > 0.049  # a loop may be a tick of its clock early

    async def test_a_late_caller_leads_beside_a_patient_one(self, open_bench: Any) -> None:
        async with open_bench(policy=self.POLICY) as bench:
            patient = await bench.caller(["k"], deadline=1000)
            while bench.counts["pending"]:
                await anyio.sleep(0.005)
            late = await bench.caller(["k"], deadline=1000)
            (await bench.store.call(2)).succeed()
            assert (await late.ended()).values == {"k": ("k", 2)}
            bench.store.calls[0].succeed()
            assert (await patient.ended()).values == {"k": ("k", 1)}
