"""Which context variables a loader sees: those of the caller that leads, or those that the group has."""

from __future__ import annotations

from contextvars import Context, ContextVar
from typing import Any

import anyio
import pytest

from singleflight.aio import FlightGroup, LoadFailed, Policy

pytestmark = pytest.mark.anyio

TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


class Seen:
    """A loader that returns whom it sees, once the test lets it; the first `failures` runs fail."""

    def __init__(self, failures: int = 0) -> None:
        self.tenants: list[str] = []
        self.failures = failures
        self.may_end = anyio.Event()

    async def load(self, keys: Any) -> Any:
        me = TENANT.get()
        self.tenants.append(me)
        fails = len(self.tenants) <= self.failures
        TENANT.set("set by a loader")
        await self.may_end.wait()
        if fails:
            raise ConnectionError
        return dict.fromkeys(keys, me)


async def ask(
    flights: FlightGroup[Any, Any], who: str, key: Any, got: dict[str, Any], joined: anyio.Event
) -> None:
    TENANT.set(who)
    try:
        async with flights.join([key]) as flight:
            joined.set()
            got[who] = (await flight)[key]
    except LoadFailed:
        got[who] = None
    assert TENANT.get() == who


async def all_ask(flights: FlightGroup[Any, Any], seen: Seen, keys: dict[str, Any]) -> dict[str, Any]:
    """Each at its turn; all of them before the first load ends."""
    got: dict[str, Any] = {}
    async with flights, anyio.create_task_group() as tasks:
        for who, key in keys.items():
            joined = anyio.Event()
            tasks.start_soon(ask, flights, who, key, got, joined)
            await joined.wait()
        await anyio.wait_all_tasks_blocked()
        seen.may_end.set()
    return got


async def test_a_follower_gets_what_was_loaded_as_the_leader() -> None:
    """Case 19. Identity that changes the value belongs in the key, as the next test has it."""
    seen = Seen()
    got = await all_ask(FlightGroup(seen.load), seen, {"alice": "k", "bob": "k"})
    assert got == {"alice": "alice", "bob": "alice"}


async def test_with_identity_in_the_key_each_gets_its_own() -> None:
    seen = Seen()
    got = await all_ask(FlightGroup(seen.load), seen, {"alice": ("alice", "k"), "bob": ("bob", "k")})
    assert got == {"alice": "alice", "bob": "bob"}


async def test_after_a_hand_over_the_loader_sees_the_new_leader_and_not_who_led_what_failed() -> None:
    seen = Seen(failures=1)
    got = await all_ask(FlightGroup(seen.load), seen, {"alice": "k", "bob": "k", "carol": "k"})
    assert got == {"alice": None, "bob": "bob", "carol": "bob"}


async def test_after_a_reset_the_loader_sees_its_leader_and_not_who_called_reset() -> None:
    seen = Seen()
    got: dict[str, Any] = {}
    async with FlightGroup(seen.load) as flights, anyio.create_task_group() as tasks:
        joined = anyio.Event()
        tasks.start_soon(ask, flights, "alice", "k", got, joined)
        await joined.wait()
        await anyio.wait_all_tasks_blocked()
        TENANT.set("operator")
        flights.reset()
        seen.may_end.set()
    assert got == {"alice": "alice"}
    assert seen.tenants == ["alice", "alice"]


async def test_a_loader_in_an_empty_context_sees_nobody() -> None:
    seen = Seen()
    got = await all_ask(FlightGroup(seen.load, loader_context=Context()), seen, {"alice": "k", "bob": "k"})
    assert got == {"alice": "nobody", "bob": "nobody"}


async def test_a_loader_in_a_given_context_sees_that_and_changes_only_its_own_copy() -> None:
    given = Context()
    given.run(TENANT.set, "service")
    seen = Seen()
    got = await all_ask(FlightGroup(seen.load, loader_context=given), seen, {"alice": "a", "bob": "b"})
    assert got == {"alice": "service", "bob": "service"}
    assert seen.tenants == ["service", "service"]
    assert given[TENANT] == "service"


@pytest.mark.parametrize("context", [None, Context()], ids=["leader's", "empty"])
async def test_a_loader_that_waits_for_itself_is_found_in_every_context(
    quiet: Any, context: Context | None
) -> None:
    async def loader(keys: Any) -> Any:
        return await flights.load(["b" if keys == ("a",) else "a"], deadline=1e9)

    flights: FlightGroup[Any, Any] = FlightGroup(
        loader, loader_context=context, policy=Policy(max_handovers=0)
    )
    with anyio.fail_after(10):
        async with flights:
            with pytest.raises(LoadFailed) as caught:
                await flights.load(["a"], deadline=1e9)
    error: BaseException = caught.value
    while error.__cause__ is not None:
        error = error.__cause__
    assert "would wait for itself" in str(error)
    quiet(flights)


async def test_the_fallback_runs_in_its_callers_context_whatever_the_loader_has() -> None:
    async def loader(keys: Any) -> Any:
        raise ConnectionError

    async def fallback(keys: Any) -> Any:
        return dict.fromkeys(keys, TENANT.get())

    TENANT.set("alice")
    async with FlightGroup(loader, fallback=fallback, loader_context=Context()) as flights:
        assert await flights.load(["k"]) == {"k": "alice"}


@pytest.mark.parametrize("context", [{}, {TENANT: "alice"}])
def test_a_context_is_a_context(context: Any) -> None:
    with pytest.raises(TypeError, match=r"loader_context: .* give a contextvars.Context"):
        FlightGroup(Seen.load, loader_context=context)  # type: ignore[arg-type]
