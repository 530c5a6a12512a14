"""What the layer costs a step and a lookup, in calls: times are the business of `bench/micro/adapter.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]

MOST = 11
"""Python calls that an idle step makes more than in mode off. It was 26."""


def calls(what: Callable[[], object]) -> int:
    """Python functions that are called in it, itself included."""
    seen = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal seen
        seen += event == "call"

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return seen


def idle_step(w: World) -> Callable[[], None]:
    """All that vLLM calls of a connector in a step in which nothing has happened."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    connector, nothing = w.loop.connector, KVConnectorOutput()

    def step() -> None:
        connector.build_connector_meta(SchedulerOutput.make_empty())
        connector.update_connector_output(nothing)
        connector.get_kv_connector_stats()

    step()  # the first tells what start-up came to
    return step


@pytest.mark.parametrize("mode", ["attach", "park"])
@pytest.mark.parametrize("loading", [False, True])
def test_an_idle_step_does_next_to_nothing(world: Make, mode: str, loading: bool) -> None:
    """Nor does it with loads in the air."""
    off, w = world(mode="off"), world(mode=mode, hold=True, blocks=300, lanes=4)
    if loading:
        for letters in ("abcd", "efgh", "ijkl"):
            w.store.put(w.prompt(letters))
            w.add(w.prompt(letters))
        w.step(2)
        assert len(w.loads) == 3
        assert idle_step(w)() is None
    assert calls(idle_step(w)) <= calls(idle_step(off)) + MOST
    w.run()


class Counted(bytes):
    """A block hash that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def chain(count: int) -> Sequence[Counted]:
    return [Counted(i.to_bytes(32, "big")) for i in range(count)]


@pytest.mark.parametrize("flights", [1, 63])
def test_a_lookup_compares_a_hash_or_two_a_flight_not_one_a_block(flights: int) -> None:
    from singleflight.core.table import PendingBlockTable

    size = 1008 // flights
    table, theirs = PendingBlockTable(chained=True), chain(1008)
    for first in range(0, 1008, size):
        part = theirs[first : first + size]
        table.lead(f"leader-{first}", part, range(size), 0.0)
    mine = chain(1008)
    Counted.compared = 0
    segments = table.run(mine, 0, 1008)
    assert sum(segment.length for segment in segments) == 1008
    assert Counted.compared <= 4 * flights


@pytest.mark.parametrize("shared", [1, 2, 37, 99, 100])
def test_where_two_prompts_part_is_found_all_the_same(shared: int) -> None:
    from singleflight.core.table import PendingBlockTable

    table = PendingBlockTable(chained=True)
    table.lead("leader", [f"a{i}" for i in range(100)], range(100), 0.0)
    mine = [f"a{i}" if i < shared else f"b{i}" for i in range(120)]
    assert [segment.length for segment in table.run(mine, 0, 120)] == [shared]
