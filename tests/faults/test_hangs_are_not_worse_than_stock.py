"""A Get that hangs: whoever would have finished with the stock connector finishes here, a deadline later.

Four receive threads, as stock with VLLM_MOONCAKE_LOAD_RECV_THREADS=4; with one, a hung Get stops every
load of the stock connector too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.core.flight import State
from singleflight.core.stats import Reason
from tests.faults.cohort import Cohort, tailed
from tests.faults.scripted_store import HANG_S, hang, scripted
from tests.faults.stock import hung_prefixes
from tests.support import BLOCK, Clock, blocks, store_prefixes

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine

BUDGET_S = 10.0 + 4 * BLOCK * 0.003125


@pytest.mark.parametrize("aborted", [False, True], ids=["", "leader aborted"])
@pytest.mark.parametrize("on_deadline", ["recompute", "load"])
def test_whoever_finishes_with_stock_finishes_here(
    cohort: Cohort,
    clock: Clock,
    configured: Callable[..., None],
    reference: Arm,
    salt: int,
    stock: dict[str, Any],
    on_deadline: str,
    aborted: bool,
) -> None:
    """Hazards C1, D3: the first Get hangs; three more requests want the same prefix, three another one.
    With stock, run beside this in the same situation, six finish, each by a Get of its own. Here the three
    others finish at once, by one Get; the three of the same prefix are released at their deadline, also
    when the leader's client has left, and finish by computing or by a load of their own."""
    configured(on_deadline)
    assert stock["hung get"]["finished"] == ["other0", "other1", "other2", "same0", "same1", "same2"]
    assert stock["hung get"]["gets"] == 7
    trunk, other = hung_prefixes(salt)
    store_prefixes(cohort.engine, trunk, other)
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(**tailed(trunk, "leader"))
        assert get.reached.wait(HANG_S)
        if aborted:
            cohort.abort("leader")
        cohort.arrive(**tailed(trunk, "same0", "same1", "same2"))
        cohort.add(**tailed(other, "other0", "other1", "other2"))
        cohort.finish("other0", "other1", "other2")
        assert cohort.fell_back() == {}
        clock.advance(BUDGET_S + 0.001)
        cohort.step(2)
        assert cohort.fell_back() == {Reason.DEADLINE: 3}
        if on_deadline == "recompute":
            assert all(cohort.running(f"same{i}") for i in range(3))
        cohort.finish(*stock["hung get"]["finished"])
        assert not cohort.finished["leader"]
        get.release.set()
        cohort.finish()
    assert cohort.engine.recorder.take().gets == (2 if on_deadline == "recompute" else 5)
    cohort.expect_equal(reference)


def test_followers_finish_though_every_receive_thread_hangs(
    cohort: Cohort, clock: Clock, reference: Arm, salt: int
) -> None:
    """Four Gets hang and with them all receive threads; a fifth load is in the queue. With stock nobody
    would finish any more. Here the follower of each of the five does: it computes the prefix."""
    prefixes = [blocks(10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3, salt=salt) for i in range(1, 6)]
    store_prefixes(cohort.engine, *prefixes)
    gets = [hang() for _ in range(4)]
    with scripted(cohort.engine, *gets):
        for i, prefix in enumerate(prefixes):
            cohort.arrive(**tailed(prefix, f"leader{i}", f"follower{i}"))
        for get in gets:
            assert get.reached.wait(HANG_S)
        clock.advance(BUDGET_S + 0.001)
        cohort.step(2)
        assert all(cohort.running(f"follower{i}") for i in range(5))
        cohort.finish(*(f"follower{i}" for i in range(5)))
        assert not any(cohort.finished[f"leader{i}"] for i in range(5))
        for get in gets:
            get.release.set()
        cohort.finish()
    assert cohort.fell_back() == {Reason.DEADLINE: 5}
    cohort.expect_equal(reference)


def test_a_hung_load_whose_clients_are_gone_costs_newcomers_nothing(
    cohort: Cohort, clock: Clock, reference: Arm, salt: int
) -> None:
    """souin#849, hazard H3: 1,060 callers joined one stalled upstream in 177 minutes. The leader of a hung
    Get is aborted and nobody else is there. Newcomers of an hour later do not join the orphan, which has
    outlived its budget: they share a load of their own."""
    trunk, _ = hung_prefixes(salt)
    store_prefixes(cohort.engine, trunk)
    prompts = tailed(trunk, "leader", "newcomer", "next")
    get = hang()
    with scripted(cohort.engine, get):
        cohort.arrive(leader=prompts.pop("leader"))
        assert get.reached.wait(HANG_S)
        flight = cohort.flight("leader")
        cohort.abort("leader")
        cohort.step()
        assert flight.state is State.ORPHANED
        clock.advance(3600)
        cohort.add(**prompts)
        cohort.finish("newcomer", "next")
        assert flight.state is State.OVERDUE
        get.release.set()
    assert cohort.engine.recorder.take().gets == 2
    assert cohort.fell_back() == {}
    cohort.expect_equal(reference)
