"""`Engine.fill`, without an engine: when it gives up, and what it then says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest

from connector_patch.lab.engine import FILL_S, Burst, Engine


class Slow(Engine):
    """Every try takes as long as all of them may; the store has its prompts after `tries` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tries: int) -> None:
        self.now, self.tries = 0.0, tries
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def burst(
        self, prompts: Mapping[str, Sequence[int]], max_tokens: int = 4, barrier: bool = False
    ) -> Burst:
        return Burst()

    def cold(self) -> None:
        self.now += FILL_S + 1
        self.tries -= 1

    def stored(self, prompt: Sequence[int]) -> bool:
        return self.tries <= 0


def test_a_last_try_that_ends_after_the_limit_counts_if_it_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Slow(monkeypatch, tries=1)
    engine.fill([[1, 2, 3]])
    assert engine.tries == 0


def test_it_names_how_many_prompts_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match="the store did not take 2 prompts in 90 s"):
        Slow(monkeypatch, tries=2).fill([[1], [2]])
