"""What the recorder sees of a request, in the order in which vLLM's scheduler calls the connector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from connector_patch.timeline import Timeline
from singleflight.traces.request import Observed


class Engine:
    """A request and the scheduler's calls about it; `at` is ms after its arrival."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timeline = Timeline(lambda: self.now)
        self.request: Any = SimpleNamespace(
            request_id="r", arrival_time=100.0, num_prompt_tokens=100, num_output_tokens=0
        )

    def at(self, ms: float) -> Timeline:
        self.now = 100.0 + ms / 1000
        return self.timeline

    def over(self, ms: float) -> Observed | None:
        return self.at(ms).over(self.request)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def received(*names: str) -> Any:
    return SimpleNamespace(finished_recving=set(names))


def test_a_load_and_its_prefill(engine: Engine) -> None:
    engine.at(1).looked_up(engine.request, 32)
    engine.at(2).allocated(engine.request, 64, range(1, 3))
    engine.at(30).output(received("r"))
    engine.at(31).allocated(engine.request, 0, None)
    engine.at(35).step()
    engine.request.num_output_tokens = 1
    engine.at(40).step()
    engine.request.num_output_tokens = 2
    engine.at(50).step()
    assert engine.over(60) == Observed(1, 2, 2, 30, 31, 100 - 32 - 64, 40)


def test_who_waits_for_room_is_admitted_when_it_gets_it(engine: Engine) -> None:
    """Asked about in every step until then; what counts of its local hit is the last answer."""
    engine.at(1).looked_up(engine.request, 0)
    engine.at(5).looked_up(engine.request, 32)
    engine.at(9).looked_up(engine.request, 64)
    engine.at(9).allocated(engine.request, 0, None)
    engine.request.num_output_tokens = 1
    assert engine.over(12) == Observed(1, 9, 0, None, 9, 36, 12), "its first token was its last"


def test_a_follower_has_loaded_nothing_and_has_waited(engine: Engine) -> None:
    engine.at(1).looked_up(engine.request, 0)
    engine.at(1).allocated(engine.request, 96, None)
    engine.at(20).output(received("somebody", "r"))
    engine.at(21).allocated(engine.request, 0, None)
    found = engine.over(22)
    assert found is not None
    assert (found.loaded_blocks, found.landed_ms, found.first_token_ms) == (0, 20, None)


def test_of_one_that_is_preempted_the_first_times_are_kept(engine: Engine) -> None:
    engine.at(1).looked_up(engine.request, 0)
    engine.at(1).allocated(engine.request, 0, None)
    engine.request.num_output_tokens = 1
    engine.at(10).step()
    engine.at(50).looked_up(engine.request, 64)
    engine.at(50).allocated(engine.request, 32, range(2, 3))
    engine.at(70).output(received("r"))
    assert engine.over(80) == Observed(1, 1, 0, None, 1, 100, 10)


def test_one_that_is_aborted_before_anything_happens_to_it(engine: Engine) -> None:
    assert engine.over(1) is None
    engine.at(1).looked_up(engine.request, 0)
    assert engine.over(2) == Observed(looked_up_ms=1)


def test_a_clock_that_is_set_back_gives_no_negative_time(engine: Engine) -> None:
    engine.at(-5000).looked_up(engine.request, 0)
    found = engine.over(-4000)
    assert found is not None
    assert found.looked_up_ms == 0


def test_nothing_is_kept_of_requests_that_have_ended(engine: Engine) -> None:
    engine.timeline.looked_up(engine.request, 0)
    engine.timeline.allocated(engine.request, 32, range(1))
    engine.over(1)
    engine.timeline.output(received("r"))
    engine.timeline.step()
    assert not engine.timeline._times
    assert not engine.timeline._unanswered
