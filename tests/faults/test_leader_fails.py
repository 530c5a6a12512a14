"""The leader's Get fails: followers fall back and finish, whatever vLLM's policy does to the leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from singleflight.core.stats import Reason
from tests.faults.scripted_store import Fault, answer_nothing, fail_keys, raise_, scripted, short_read
from tests.support import blocks, expect_equal, finish, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine

FAULTS = {
    "all keys": lambda: fail_keys(),
    "the first key": lambda: fail_keys(0),
    "a key in the middle": lambda: fail_keys(2),
    "an exception": lambda: raise_(RuntimeError("the wire is cut")),
    "thread death": lambda: raise_(SystemExit()),
    "a short read": lambda: short_read(1),
    "no answer at all": lambda: answer_nothing(),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_followers_finish_and_load_at_most_once_more(
    engine: Engine, reference: Arm, salt: int, policy: str, fault: object
) -> None:
    """Hazards C3, E1, E7: five requests are attached to one load of four blocks when it fails; the four
    followers fall back. Under "fail" vLLM ends the leader with an error, the first follower to come back
    loads again and three attach to it: two Gets. Under "recompute" vLLM has the leader compute the prefix
    itself, first in the next pass, and the followers hit what it computes: one Get."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(5)}
    before = engine.connector.layer.table.stats.fell_back[Reason.LEADER_FAILED]
    engine.gate.open.clear()
    assert callable(fault)
    first: Fault = fault()
    with scripted(engine, first):
        burst, steps = until_scheduled(engine, prompts)
        tokens = finish(engine, burst, steps)
    assert engine.recorder.take().gets == (2 if policy == "fail" else 1)
    assert engine.connector.layer.table.stats.fell_back[Reason.LEADER_FAILED] - before == 4
    if policy == "fail":
        assert tokens.pop("r0") == [], "the leader meets vLLM's policy"
        prompts.pop("r0")
    expect_equal(reference, prompts, tokens)


def test_a_failure_that_is_reported_before_the_end_of_the_load_is_not_forgotten(
    engine: Engine, reference: Arm, salt: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receive thread notes the failure, then the end; the worker asks for ends first and failures
    second. When it asks in between, one step reports the failure and a later one the end, which then must
    not pass for a landing: the blocks hold rubbish. Seen as a flaky test on a busy machine; forced here."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(4)}
    stock = engine.worker_connector.get_transfer_results
    late: set[str] = set()

    def ends_one_step_later(finished: set[str]) -> KVConnectorTransferResults:
        results = stock(finished)
        ends = set(results.finished_recving or ())
        now, then = ends - results.failed_recving, ends & results.failed_recving
        now |= late
        late.clear()
        late.update(then)
        return KVConnectorTransferResults(results.finished_sending, now, results.failed_recving)

    monkeypatch.setattr(engine.worker_connector, "get_transfer_results", ends_one_step_later)
    engine.gate.open.clear()
    with scripted(engine, short_read(2)):
        burst, steps = until_scheduled(engine, prompts)
        tokens = finish(engine, burst, steps)
    if policy == "fail":
        assert tokens.pop("r0") == []
        prompts.pop("r0")
    expect_equal(reference, prompts, tokens)
