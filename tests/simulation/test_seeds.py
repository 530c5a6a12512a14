"""Random stories of every supported configuration: nothing is wrong, lost, left over or stuck.

How many: some two minutes of one core in all. `make simulate` runs as many as there is time for.
"""

from __future__ import annotations

import pytest

from tests.simulation.conftest import needs_who_is_chosen

pytestmark = pytest.mark.timeout(600)

OURS = {"attach": 800, "park": 500}
COMPUTING = {"attach": 300, "park": 200}
"""Of these, stories in which requests may compute what the store has."""
STOCK = {"stock": 250, "shadow": 150, "off": 100}
OTHERS: dict[str, dict[str, object]] = {
    "mla": {"spec": "mla"},
    "two stages": {"stages": 2},
    "three stages": {"stages": 3},
    "prefill context parallel": {"pcp": 2, "spec": "mla"},
    "decode context parallel": {"dcp": 2, "ranks": 2, "spec": "mla"},
    "n-gram": {"drafts": 2},
    "eagle": {"drafts": 2, "drafter": "eagle"},
    "draft model": {"drafts": 3, "drafter": "draft_model"},
    "mtp of a DeepSeek over two stages": {
        "drafts": 1,
        "drafter": "mtp",
        "spec": "mla",
        "stages": 2,
        "async_scheduling": True,  # as on GPUs
        "v2_runner": True,
    },
}


def run(mode: str, seeds: int, **fixed: object) -> object:
    """The tally; a failing seed is shrunk and told."""
    from . import campaign
    from .seeds import story
    from .shrink import report, shrink

    tally = campaign.run(mode, range(seeds), stop_at_failure=True, **fixed)
    print(tally)
    if tally.failures:
        seed, _ = tally.failures[0]
        pytest.fail(f"seed {seed} of {mode}, shrunk:\n\n{report(shrink(story(seed, mode, **fixed)))}")
    return tally


@pytest.mark.parametrize("mode", OURS)
def test_ours_passes(mode: str) -> None:
    """Only vLLM's own bugs explain a failure; and the stories meet what they are about."""
    from .known import OF_VLLM

    seeds = OURS[mode] - COMPUTING[mode]
    tally = run(mode, seeds)
    assert set(tally.known) <= set(OF_VLLM)
    assert all(tally.layer[name] > 20 for name in ("attached", "ready", "failed", "cancelled"))
    assert tally.layer["overdue"] > 5
    assert tally.layer["discarded"] > 5
    assert tally.gets > seeds


@pytest.mark.parametrize("mode", OURS)
def test_ours_passes_where_requests_may_compute(mode: str) -> None:
    from .known import OF_VLLM

    tally = run(mode, COMPUTING[mode], load_or_compute="on")
    assert set(tally.known) <= set(OF_VLLM)
    assert all(tally.layer[f"chose_{what}"] > COMPUTING[mode] / 4 for what in ("join", "load", "compute"))


@pytest.mark.parametrize("mode", STOCK)
def test_stock_passes_but_for_its_known_bugs(mode: str) -> None:
    """Else the simulation would blame our layer for what is not its doing. Shadow and off are stock."""
    from .known import OF_STOCK, RESERVED_BY_EACH_OTHER, RESET_RUNNING

    tally = run(mode, STOCK[mode])
    assert set(tally.known) <= set(OF_STOCK)
    assert {RESET_RUNNING, RESERVED_BY_EACH_OTHER} <= set(tally.known)
    assert sum(map(len, tally.known.values())) < 0.1 * tally.stories


@pytest.mark.parametrize("mode", OURS)
@pytest.mark.parametrize("fixed", OTHERS.values(), ids=OTHERS)
def test_other_configurations(mode: str, fixed: dict[str, object]) -> None:
    """What a seed does not decide, since most deployments have none of it."""
    tally = run(mode, 35, **fixed)
    assert tally.layer["ready"] > 5


BESIDE = {"attach": 100, "park": 50, "stock": 40, "shadow": 20}


@pytest.mark.parametrize("other", ["before", "after"])
@pytest.mark.parametrize("mode", BESIDE)
def test_beside_another_connector(mode: str, other: str) -> None:
    """In vLLM's MultiConnector, whoever of the two is asked first; the other one's loads fail too."""
    from .known import OF_STOCK, OF_VLLM, RESERVED_BY_EACH_OTHER

    needs_who_is_chosen(mode, other)
    tally = run(mode, BESIDE[mode], other=other)
    known = {*OF_VLLM, RESERVED_BY_EACH_OTHER} if mode in OURS else OF_STOCK
    assert set(tally.known) <= set(known)
    assert tally.borrowed > 5 * tally.stories
    assert tally.layer["ready"] > 10 or mode not in OURS
