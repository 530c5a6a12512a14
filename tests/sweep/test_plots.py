"""Plots of traces with little to show: drawn without a warning, and of the size that is promised."""

import struct
from pathlib import Path

import pytest

from singleflight.sim import kernel
from singleflight.sim.columns import Columns
from singleflight.sim.gaps import reuse_gaps
from singleflight.sweep import plots
from singleflight.sweep.grid import Grid
from singleflight.sweep.summary import summarise
from singleflight.traces.request import Lengths, Request
from singleflight.traces.synth import Synth, generate

TRACES = {
    "one request": [Request(0, [1], Lengths(1, 1))],
    "no reuse": list(generate(Synth("poisson", requests=50))),
    "all at once": [Request(0, [1, 2], Lengths(1, 1))] * 50,
    "bursts": list(generate(Synth("bursts", requests=200))),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("windows", [(10,), (10, 100, 100_000_000)])
@pytest.mark.parametrize("name", TRACES)
def test_drawn_without_a_warning(name: str, windows: tuple[int, ...], tmp_path: Path) -> None:
    columns = Columns.from_requests(TRACES[name])
    grid = Grid(windows=windows, instances=(1, 2), capacities=(10,))
    outcomes = [kernel.simulate(columns, config) for config in grid.configs()]
    plots.redundancy(tmp_path / "a.png", {name: summarise(outcomes), "again": summarise(outcomes)})
    plots.fanin(tmp_path / "b.png", name, outcomes)
    plots.reuse_gaps(tmp_path / "c.png", name, reuse_gaps(columns), columns.n_lookups, grid.windows)
    for path in tmp_path.iterdir():
        assert struct.unpack(">II", path.read_bytes()[16:24]) == (792, 462)
        assert path.stat().st_size < 150_000
