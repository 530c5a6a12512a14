"""Loaders that ask for keys whose loaders ask for theirs: refused at once, and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from singleflight.aio import FlightGroup, FlightTimeout, LoadFailed, Policy

pytestmark = pytest.mark.anyio

FOR_EVER = 1e9
"""Seconds; a caller that only its deadline ends hangs, and the test's limit ends it."""


def root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class Ring:
    """Loaders that ask for what `needs` says, once all of `asked` are being loaded."""

    def __init__(self, needs: Mapping[str, str], **options: Any) -> None:
        self.needs = needs
        self.runs = 0
        self.all_run = anyio.Event()
        self.flights: FlightGroup[str, str] = FlightGroup(self.load, **options)
        self.errors: dict[str, BaseException] = {}

    async def load(self, keys: Sequence[str]) -> dict[str, str]:
        self.runs += 1
        if self.runs == len(self.needs):
            self.all_run.set()
        await self.all_run.wait()
        (key,) = keys
        if self.needs[key]:
            await self.flights.load([self.needs[key]], deadline=FOR_EVER)
        return {key: key}

    async def ask(self, key: str) -> None:
        try:
            await self.flights.load([key], deadline=FOR_EVER)
        except LoadFailed as error:
            self.errors[key] = error

    async def run(self) -> None:
        with anyio.fail_after(20):
            async with self.flights, anyio.create_task_group() as tasks:
                for key in self.needs:
                    tasks.start_soon(self.ask, key)


@pytest.mark.parametrize(
    "needs", [{"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}, {"a": "b", "b": "c", "c": "d", "d": "a"}]
)
@pytest.mark.parametrize("handovers", [0, 1, 3])
async def test_loaders_that_ask_for_each_others_keys_are_told_instead_of_waiting_for_each_other(
    quiet: Any, needs: dict[str, str], handovers: int
) -> None:
    ring = Ring(needs, policy=Policy(max_handovers=handovers))
    await ring.run()
    quiet(ring.flights)
    assert set(ring.errors) == set(needs)
    for error in ring.errors.values():
        assert type(root_cause(error)) is RuntimeError
        assert "it would wait for itself" in str(root_cause(error))


async def test_the_error_names_the_ring(quiet: Any) -> None:
    ring = Ring({"a": "b", "b": "a"}, policy=Policy(max_handovers=0))
    await ring.run()
    messages = {str(root_cause(error)) for error in ring.errors.values()}
    assert messages in (
        {"the loader of 'b' asked for a key of 'a', which wait for 'b': it would wait for itself"},
        {"the loader of 'a' asked for a key of 'b', which wait for 'a': it would wait for itself"},
    )


async def test_a_chain_without_a_ring_is_loaded(quiet: Any) -> None:
    ring = Ring({"a": "b", "b": "c", "c": "d", "d": ""})
    await ring.run()
    quiet(ring.flights)
    assert ring.errors == {}


async def test_a_ring_through_two_groups(quiet: Any) -> None:
    """As when a router's blocks need a tokenizer's tables, whose loader asks the router."""

    async def load_one(keys: Any) -> Any:
        return await two.load(["in two"], deadline=FOR_EVER)

    async def load_two(keys: Any) -> Any:
        return await one.load(["in one"], deadline=FOR_EVER)

    one: FlightGroup[str, Any] = FlightGroup(load_one)
    two: FlightGroup[str, Any] = FlightGroup(load_two)
    with anyio.fail_after(10):
        async with one, two:
            with pytest.raises(LoadFailed) as caught:
                await one.load(["in one"], deadline=FOR_EVER)
    assert "would wait for itself" in str(root_cause(caught.value))
    quiet(one)
    quiet(two)


async def test_a_ring_through_a_handle_that_was_entered_outside_the_loader(quiet: Any) -> None:
    b_runs = anyio.Event()

    async def loader(keys: Any) -> Any:
        if keys == ("b",):
            b_runs.set()
            await anyio.wait_all_tasks_blocked()  # a's loader awaits b
            return await flights.load(["a"], deadline=FOR_EVER)
        return await flight_of_b

    flights: FlightGroup[str, Any] = FlightGroup(loader, policy=Policy(max_handovers=0))
    with anyio.fail_after(10):
        async with flights, flights.join(["b"], deadline=FOR_EVER) as flight_of_b:
            with pytest.raises(LoadFailed) as caught:
                await flights.load(["a"], deadline=FOR_EVER)
            assert "would wait for itself" in str(root_cause(caught.value))
    assert b_runs.is_set()
    quiet(flights)


async def test_a_ring_through_a_worker_thread(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        def blocking() -> Any:
            return anyio.from_thread.run(load, "b" if keys == ("a",) else "a")

        return await anyio.to_thread.run_sync(blocking)

    async def load(key: str) -> Any:
        return await flights.load([key], deadline=FOR_EVER)

    flights: FlightGroup[str, Any] = FlightGroup(loader, policy=Policy(max_handovers=0))
    with anyio.fail_after(10):
        async with flights:
            with pytest.raises(LoadFailed) as caught:
                await load("a")
    assert "would wait for itself" in str(root_cause(caught.value))
    quiet(flights)


async def test_a_loader_that_awaits_a_handle_on_its_own_key(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        return await flight

    flights: FlightGroup[str, Any] = FlightGroup(loader)
    with anyio.fail_after(10):
        async with flights, flights.join(["a"], deadline=FOR_EVER) as flight:
            with pytest.raises(LoadFailed) as caught:
                await flight
    assert "called for" in str(root_cause(caught.value))
    quiet(flights)


async def test_a_handle_made_outside_and_entered_in_the_loader_is_the_loaders(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        async with made_outside:
            return await made_outside

    flights: FlightGroup[str, Any] = FlightGroup(loader)
    with anyio.fail_after(10):
        async with flights:
            made_outside = flights.join(["a"], deadline=FOR_EVER)
            with pytest.raises(LoadFailed) as caught:
                await flights.load(["a"], deadline=FOR_EVER)
    assert "called for" in str(root_cause(caught.value))
    quiet(flights)


async def test_the_fallback_of_a_caller_in_a_loader_may_not_wait_for_that_loader_either(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        if keys == ("a",):
            return {"a": await flights.load(["b"], deadline=FOR_EVER)}
        raise ConnectionError

    async def fallback(keys: Any) -> Any:
        return await flights.load(["a"], deadline=FOR_EVER) if "b" in keys else dict.fromkeys(keys, "own")

    flights: FlightGroup[str, Any] = FlightGroup(loader, fallback=fallback)
    with anyio.fail_after(10):
        async with flights:
            assert await flights.load(["a"], deadline=FOR_EVER) == {"a": "own"}
    quiet(flights)


async def test_who_waits_no_longer_closes_no_ring(quiet: Any) -> None:
    """a's loader gave up waiting for b, which another caller keeps; then b's loader may wait for a."""
    gave_up, may_return = anyio.Event(), anyio.Event()

    async def loader(keys: Any) -> Any:
        if keys == ("a",):
            with anyio.CancelScope() as scope:
                async with flights.join(["b"], deadline=FOR_EVER):
                    b_asked.set()
                    await b_kept.wait()
                    scope.cancel()
                    await anyio.sleep_forever()
            gave_up.set()
            await may_return.wait()
            return {"a": "without b"}
        await gave_up.wait()
        asked.set()
        return {"b": await flights.load(["a"], deadline=FOR_EVER)}

    async def let_a_return() -> None:
        await asked.wait()
        await anyio.wait_all_tasks_blocked()
        may_return.set()

    async def load_a() -> None:
        values.update(await flights.load(["a"], deadline=FOR_EVER))

    b_asked, b_kept, asked = anyio.Event(), anyio.Event(), anyio.Event()
    values: dict[str, Any] = {}
    flights: FlightGroup[str, Any] = FlightGroup(loader, policy=Policy(max_handovers=0))
    with anyio.fail_after(10):
        async with flights, anyio.create_task_group() as tasks:
            tasks.start_soon(load_a)
            tasks.start_soon(let_a_return)
            await b_asked.wait()
            async with flights.join(["b"], deadline=FOR_EVER) as flight:
                b_kept.set()
                values.update(await flight)
    assert values == {"a": "without b", "b": {"a": "without b"}}
    quiet(flights)


async def test_who_has_timed_out_closes_no_ring_though_it_has_not_left_yet(quiet: Any) -> None:
    async def loader(keys: Any) -> Any:
        if keys == ("a",):
            async with flights.join(["b"], deadline=0.01) as flight_of_b:
                b_asked.set()
                with pytest.raises(FlightTimeout):
                    await flight_of_b
                gave_up.set()
                await may_return.wait()
            return {"a": "without b"}
        await gave_up.wait()
        async with flights.join(["a"], deadline=FOR_EVER) as flight_of_a:
            may_return.set()
            return {"b": await flight_of_a}

    b_asked, gave_up, may_return = anyio.Event(), anyio.Event(), anyio.Event()
    flights: FlightGroup[str, Any] = FlightGroup(loader, policy=Policy(max_handovers=0))
    with anyio.fail_after(10):
        async with flights, flights.join(["a"], deadline=FOR_EVER) as flight_of_a:
            await b_asked.wait()
            assert await flights.load(["b"], deadline=FOR_EVER) == {"b": {"a": "without b"}}
            assert await flight_of_a == {"a": "without b"}
    quiet(flights)


async def test_what_a_landed_load_left_running_closes_no_ring(quiet: Any) -> None:
    """x's loader leaves a task behind that waits for b, b waits for a, and a has x already."""

    async def loader(keys: Any) -> Any:
        if keys == ("x",):
            tasks.start_soon(flights.load, ["b"])
            await a_waits.wait()
        elif keys == ("a",):
            await flights.load(["x", "y"], deadline=FOR_EVER)
        elif keys == ("y",):
            a_waits.set()
            await b_waits.wait()
        else:
            await landed["x"].wait()
            async with flights.join(["a"], deadline=FOR_EVER) as flight:
                b_waits.set()
                await flight
        return dict.fromkeys(keys)

    async def ask(key: str) -> None:
        await flights.load([key], deadline=FOR_EVER)
        landed[key].set()

    landed = {"x": anyio.Event(), "a": anyio.Event()}
    a_waits, b_waits = anyio.Event(), anyio.Event()
    flights: FlightGroup[str, None] = FlightGroup(loader, policy=Policy(max_handovers=0))
    with anyio.fail_after(10):
        async with flights, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "x")
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(ask, "a")
    assert landed["a"].is_set()
    quiet(flights)


async def test_a_loader_that_asks_many_times_keeps_no_handle_that_it_has_left(quiet: Any) -> None:
    kept: list[int] = []

    async def loader(keys: Any) -> Any:
        if keys == ("many",):
            (load,) = flights._driver.running
            for number in range(100):
                await flights.load([number])
                kept.append(len(load.asks))
        return dict.fromkeys(keys)

    async with FlightGroup(loader) as flights:
        await flights.load(["many"])
    assert kept == [0] * 100
    quiet(flights)


def test_a_hand_over_does_not_close_a_ring(quiet: Any) -> None:
    """a's loader follows a load of x, past its budget, which fails; the next load of x waits for a."""
    runs_of_x = 0

    async def loader(keys: Any) -> Any:
        nonlocal runs_of_x
        if keys == ("a",):
            return {"a": await flights.load(["x"], deadline=FOR_EVER)}
        runs_of_x += 1
        if runs_of_x == 1:
            await anyio.sleep(12)
            raise ConnectionError("the first load of x")
        return {"x": await flights.load(["a"], deadline=FOR_EVER)}

    async def ask(key: str) -> None:
        with pytest.raises(LoadFailed):
            await flights.load([key], deadline=FOR_EVER)
        ended[key, anyio.current_time() - start] = None

    async def main() -> None:
        nonlocal start
        start = anyio.current_time()
        async with flights, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "x")
            await anyio.sleep(5)
            tasks.start_soon(ask, "a")
            await anyio.sleep(6)
            assert flights.snapshot()["overdue"] == 1
            tasks.start_soon(ask, "x")
            await anyio.sleep(0.5)
            assert flights.snapshot()["loading"] == 3

    start = 0.0
    ended: dict[tuple[str, float], None] = {}
    flights: FlightGroup[str, Any] = FlightGroup(
        loader, policy=Policy(deadline_base_s=10, deadline_per_block_s=0)
    )
    anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
    assert set(ended) == {("x", 12), ("a", 12)}
    quiet(flights)


# -- every graph of keys that need keys --------------------------------------------------------------------

KEYS = "abcdef"
GRAPHS = st.fixed_dictionaries(
    {key: st.lists(st.sampled_from(KEYS), max_size=2, unique=True).map(tuple) for key in KEYS}
)
CALLERS = st.lists(
    st.tuples(
        st.integers(0, 6), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True).map(tuple)
    ),
    min_size=1,
    max_size=6,
)


class World:
    """A key's value is that of the keys that it needs, which its loader asks for: at once or in turn."""

    def __init__(self, needs: Mapping[str, tuple[str, ...]], together: bool, handovers: int) -> None:
        self.needs = needs
        self.together = together
        self.flights: FlightGroup[str, str] = FlightGroup(self.load, policy=Policy(max_handovers=handovers))
        self.endings: list[tuple[tuple[str, ...], dict[str, str] | BaseException]] = []

    async def load(self, keys: Sequence[str]) -> dict[str, str]:
        values = {}
        for key in keys:
            await anyio.lowlevel.checkpoint()
            needed = self.needs[key]
            if self.together:
                parts = await self.flights.load(needed, deadline=FOR_EVER)
            else:
                parts = {}
                for each in needed:
                    parts |= await self.flights.load([each], deadline=FOR_EVER)
            values[key] = f"{key}({''.join(parts[each] for each in needed)})"
        return values

    async def caller(self, arrives: int, keys: tuple[str, ...]) -> None:
        for _ in range(arrives):
            await anyio.lowlevel.checkpoint()
        try:
            self.endings.append((keys, await self.flights.load(keys, deadline=FOR_EVER)))
        except LoadFailed as error:
            self.endings.append((keys, error))

    async def run(self, callers: list[tuple[int, tuple[str, ...]]]) -> None:
        with anyio.fail_after(20):
            async with self.flights, anyio.create_task_group() as tasks:
                for arrives, keys in callers:
                    tasks.start_soon(self.caller, arrives, keys)

    def value(self, key: str, above: tuple[str, ...] = ()) -> str | None:
        """What the key's value has to be; None if there is a ring under it."""
        if key in above:
            return None
        parts = [self.value(each, (*above, key)) for each in self.needs[key]]
        return None if None in parts else f"{key}({''.join(map(str, parts))})"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    needs=GRAPHS, callers=CALLERS, together=st.booleans(), single=st.booleans(), handovers=st.integers(0, 2)
)
def test_nobody_hangs_and_only_rings_are_refused(
    quiet: Any,
    backend: str,
    needs: dict[str, tuple[str, ...]],
    callers: list[tuple[int, tuple[str, ...]]],
    together: bool,
    single: bool,
    handovers: int,
) -> None:
    if single:
        callers = [(arrives, keys[:1]) for arrives, keys in callers]
    world = World(needs, together, handovers)
    anyio.run(world.run, callers, backend=backend)  # its limit is the test: no deadline ends a caller
    quiet(world.flights)
    assert len(world.endings) == len(callers)
    # Keys that are loaded by one call land together, so such a call may be in a ring where its keys are not.
    one_key_a_load = single and not together
    for keys, ending in world.endings:
        expected = {key: world.value(key) for key in keys}
        if isinstance(ending, dict):
            event("values")
            assert ending == expected
        else:
            event("refused")
            assert type(root_cause(ending)) is RuntimeError
            assert "it would wait for itself" in str(root_cause(ending))
            assert None in expected.values() or not one_key_a_load
