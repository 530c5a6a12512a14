"""What the table offers to drivers with a timer for each request."""

from __future__ import annotations

from singleflight.core.policy import Policy
from singleflight.core.stats import Outcome, Reason
from singleflight.core.table import Left, PendingBlockTable

POLICY = Policy(deadline_base_s=10, deadline_per_block_s=0)


def led(table: PendingBlockTable) -> None:
    assert table.lead("L", ["a", "b"], [1, 2], now=0.0) is not None


def attach(table: PendingBlockTable, request: str, now: float, deadline: float | None = None) -> None:
    table.attach(request, table.run(["a", "b"], 0, 2), now, deadline=deadline)


def test_a_deadline_of_its_own_replaces_the_policys() -> None:
    table = PendingBlockTable(POLICY)
    led(table)
    attach(table, "early", 0.0, deadline=5.0)
    attach(table, "usual", 0.0)
    assert table.expire(5.0) == [Left("early", Outcome.FELL_BACK, Reason.DEADLINE)]
    assert table.expire(10.0) == [Left("usual", Outcome.FELL_BACK, Reason.DEADLINE)]


def test_expire_one_releases_that_request_and_no_other() -> None:
    table = PendingBlockTable(POLICY)
    led(table)
    attach(table, "one", 0.0, deadline=5.0)
    attach(table, "two", 0.0, deadline=5.0)
    assert table.expire_one("one", 5.0) == [Left("one", Outcome.FELL_BACK, Reason.DEADLINE)]
    assert not table.waiting("one")
    assert table.waiting("two")
    assert table.stats.fell_back[Reason.DEADLINE] == 1


def test_a_flight_stays_joinable_until_the_policys_budget() -> None:
    table = PendingBlockTable(POLICY)
    led(table)
    attach(table, "hurried", 0.0, deadline=1.0)
    table.expire_one("hurried", 9.99)
    assert table.find("a") is not None
    attach(table, "next", 9.99, deadline=11.0)
    table.expire_one("next", 10.0)
    assert table.find("a") is None
    assert table.stats.overdue == 1


def test_a_leader_that_waits_no_longer_makes_its_old_flight_overdue() -> None:
    table = PendingBlockTable(POLICY)
    led(table)
    assert table.expire_one("L", 9.99) == []
    assert table.find("a") is not None
    assert table.expire_one("L", 10.0) == []
    assert table.find("a") is None


def test_expire_one_of_a_stranger_changes_nothing() -> None:
    table = PendingBlockTable(POLICY)
    led(table)
    before = repr(table)
    assert table.expire_one("stranger", 1e9) == []
    assert repr(table) == before
