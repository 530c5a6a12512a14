"""The leader's Get fails: followers fall back and finish, whatever vLLM's policy does to the leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from singleflight.stats import Reason
from tests.faults.scripted_store import Fault, answer_nothing, fail_keys, raise_, scripted, short_read
from tests.support import blocks, expect_equal, finish, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.engine import Engine
    from singleflight.arms import Arm

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
    before = engine.connector.attach.table.stats.fell_back[Reason.LEADER_FAILED]
    engine.gate.open.clear()
    assert callable(fault)
    first: Fault = fault()
    with scripted(engine, first):
        burst, steps = until_scheduled(engine, prompts)
        tokens = finish(engine, burst, steps)
    assert engine.recorder.take().gets == (2 if policy == "fail" else 1)
    assert engine.connector.attach.table.stats.fell_back[Reason.LEADER_FAILED] - before == 4
    if policy == "fail":
        assert tokens.pop("r0") == [], "the leader meets vLLM's policy"
        prompts.pop("r0")
    expect_equal(reference, prompts, tokens)
