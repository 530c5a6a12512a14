"""What counts the CPU time of the scheduler's thread tells steps in which something happens from those that
wait (`connector_patch.lab.cpu`). The clock ticks once a reading, so that counts are exact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]


def counting(w: World) -> Callable[[], dict[str, Any]]:
    from connector_patch.lab import cpu

    counts = [0] * len(cpu.COUNTS)
    scheduler = w.loop.scheduler
    cpu.count(scheduler, scheduler.connector, counts, count().__next__)
    return lambda: dict(zip(cpu.COUNTS, counts, strict=True))


@pytest.mark.parametrize("mode", ["stock", "attach"])
def test_steps_that_wait_for_a_load_are_counted_apart(world: Make, mode: str) -> None:
    w = world(mode=mode, hold=True)
    now = counting(w)
    prompt = w.prompt("abc")
    w.store.put(prompt)
    w.add(prompt)
    w.step(1)
    asked = now()
    assert asked["busy_steps"] == 1
    assert asked["lookups"] == 1
    assert 0 < asked["lookup_ns"] <= asked["connector_ns"] < asked["busy_ns"]
    w.step(5)
    waited = now()
    assert waited["idle_steps"] >= 5
    assert waited["idle_ns"] > asked["idle_ns"]
    for name in ("busy_steps", "lookups", "lookup_ns"):
        assert waited[name] == asked[name], name
    w.land()
    w.run()
    done = now()
    assert done["busy_steps"] > waited["busy_steps"]
    assert done["lookups"] == 1


def test_every_request_that_is_asked_about_is_a_lookup(world: Make) -> None:
    w = world(mode="attach")
    now = counting(w)
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    for _ in range(4):
        w.add(prompt)
    w.run()
    assert now()["lookups"] == 4
