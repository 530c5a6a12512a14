"""A failing story becomes a short one that fails in the same way."""

from __future__ import annotations

import pytest


def test_shrinks_to_what_matters() -> None:
    from . import mutations
    from .seeds import story
    from .shrink import failure_of, report, shrink
    from .story import Add

    with mutations.broken(mutations.publishes_at_allocation):
        long = next(s for s in (story(seed, "attach") for seed in range(99)) if failure_of(s) is not None)
        short = shrink(long)
        told = report(short)
        assert failure_of(short) is not None
    assert failure_of(short) is None
    assert len(short.actions) <= 4 < len(long.actions)
    assert sum(isinstance(action, Add) for action in short.actions) <= 2
    assert short.setup.differs().keys() <= {"mode", "token_budget", "block_size", "lookup_async"}
    assert "Violation: " in told
    assert " arrives: " in told


def test_a_story_that_does_not_fail_is_not_shrunk() -> None:
    from .seeds import story
    from .shrink import shrink

    with pytest.raises(AssertionError, match="does not fail"):
        shrink(story(0, "attach"))


def test_one_seed_one_run() -> None:
    from .seeds import story

    first, second = (story(7, "attach").run(verbose=True).story() for _ in range(2))
    assert first == second
    assert story(7, "attach") != story(8, "attach")
