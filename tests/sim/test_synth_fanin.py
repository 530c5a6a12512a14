"""Synthetic traces have the fan-in they promise: the generator is judged by the model, not by itself."""

import pytest

from singleflight.sim import kernel
from singleflight.sim.columns import Columns
from singleflight.sim.config import Config
from singleflight.traces.synth import Synth, generate


def fanin(what: Synth, window: int) -> dict[int, int]:
    config = Config(window, 1, 10**6, warmup=(0, 1))
    return dict(kernel.simulate(Columns.from_requests(generate(what)), config).fanin["steady"])


@pytest.mark.parametrize("k", [2, 8, 31])
def test_bursts(k: int) -> None:
    # 40 whole bursts, far enough apart that the last of one comes before the first of the next.
    what = Synth("bursts", requests=40 * k, fan_in=k, rate=0.5, spread_ms=50, shared_blocks=3, own_blocks=2)
    assert fanin(what, window=51) == {k: 40 * 3, 1: 40 * k * 2}


@pytest.mark.parametrize("k", [2, 16])
def test_agents(k: int) -> None:
    what = Synth(
        "agents", requests=30 * (k + 1), fan_in=k, rate=0.01, spread_ms=20, shared_blocks=4, own_blocks=2
    )
    # A parent's own blocks are cached when its children come; the plan is what they load together.
    assert fanin(what, window=21) == {k: 30 * 4, 1: 30 * 2 + 30 * k * 2}


def test_poisson_shares_nothing() -> None:
    assert fanin(Synth("poisson", requests=500, own_blocks=3, rate=1000.0), window=10**6) == {1: 1500}


def test_shared_prompts_are_loaded_once_each() -> None:
    what = Synth("shared", requests=500, prompts=5, shared_blocks=3, own_blocks=1, rate=100.0)
    hist = fanin(what, window=10**9)  # no load ever ends: every use of a prompt joins its first
    assert sum(f * n for f, n in hist.items() if f > 1) == 500 * 3
    assert sum(n for f, n in hist.items() if f > 1) == 5 * 3
