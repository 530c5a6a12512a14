"""Random stories of vLLM's own connectors to CPU memory, alone and in our wrapper: some 20 s of one core."""

from __future__ import annotations

import pytest

from .test_seeds import run

pytestmark = pytest.mark.timeout(600)

SEEDS = {"stock": 40, "attach": 60, "park": 40, "shadow": 8, "off": 6}


@pytest.mark.parametrize("store", ["offloading", "simple"])
@pytest.mark.parametrize("mode", SEEDS)
def test_random_stories(mode: str, store: str) -> None:
    """Only bugs of vLLM's and of those connectors' explain a failure, and the latter none of ours."""
    from .known import OF_STOCK, OF_VLLM

    ours = mode in ("attach", "park")
    tally = run(mode, SEEDS[mode], store=store, lazy=False)
    assert set(tally.known) <= set(OF_VLLM if ours else OF_STOCK)
    assert tally.tokens_loaded > 5 * tally.stories
    assert not ours or tally.layer["ready"] > SEEDS[mode]
