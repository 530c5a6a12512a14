"""The simulation notices each of the broken versions of the layer, within a few hundred seeds."""

from __future__ import annotations

import pytest

from tests.simulation.conftest import needs_who_is_chosen

pytestmark = pytest.mark.timeout(300)

WITHIN = 300
"""Seeds. The slowest to be noticed took 58."""

ATTACH = (
    "publishes_at_allocation",
    "failure_lands",
    "keeps_blocks",
    "nobody_acknowledged",
    "ready_before_landing",
    "last_token_adopted",
    "reset_forgotten",
    "discarded_published",
    "freed_in_air",
    "leader_let_go",
    "no_deadline",
    "one_rank_acknowledges",
    "short_read_lands",
    "thread_lost",
    "one_block_too_many_is_there",
    "other_ranks_are_not_asked",
    "reserves_for_nobody",
    "load_of_pass_lost",
    "waits_for_what_has_ended",
    "adopts_what_is_not_proved",
    "adopts_unchosen",
    "adopts_without_windows",
    "goes_on_without_windows",
    "windows_are_not_asked_for",
)
PARK = ("loads_again", "waits_for_what_has_ended", "no_deadline")


@pytest.mark.parametrize(
    ("mode", "name"), [*(("attach", name) for name in ATTACH), *(("park", name) for name in PARK)]
)
def test_noticed(mode: str, name: str) -> None:
    from . import campaign, mutations

    fixed = mutations.FIXED.get(name, {})
    needs_who_is_chosen(mode, fixed.get("other"))
    with mutations.broken(getattr(mutations, name)):
        tally = campaign.run(mode, range(WITHIN), stop_at_failure=True, **fixed)
    assert tally.failures, f"{name} is not noticed in {WITHIN} seeds"


def test_every_mutation_is_listed_here() -> None:
    from . import mutations

    assert tuple(mutation.__name__ for mutation in mutations.ATTACH) == ATTACH
    assert tuple(mutation.__name__ for mutation in mutations.PARK) == PARK


def test_afterwards_the_layer_is_whole() -> None:
    """A mutation ends with its `with`."""
    from . import campaign, mutations

    for mutation in (*mutations.ATTACH, *mutations.PARK):
        with mutations.broken(mutation):
            pass
    assert not campaign.run("attach", range(25)).failures
