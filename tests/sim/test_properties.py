"""What must hold for every trace, on traces that hypothesis makes."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from singleflight.sim import kernel, model
from singleflight.sim.columns import Columns
from singleflight.sim.config import LOOKUPS, PHASES, ROUTINGS, Config
from singleflight.sim.counts import N_ADDITIVE
from singleflight.sim.gaps import reuse_gaps, statistics
from singleflight.traces.request import Lengths, Request

BIG = [7, 2**32 + 7, 2**53, 2**53 + 1, 2**63, 2**64 - 1]


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Few blocks and small gaps, so that hits, evictions, joins and ties all happen; repeats in a row too."""
    block = st.one_of(st.integers(0, 12), st.sampled_from(BIG))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 9, 10, 11, 40]), min_size=1, max_size=60))
    return [
        Request(int(t), draw(st.lists(block, min_size=1, max_size=7)), Lengths(1, 1))
        for t in np.cumsum(gaps).tolist()
    ]


configs = st.builds(
    Config,
    w_eff_ms=st.sampled_from([1, 2, 3, 5, 10, 100, 10**6]),
    instances=st.sampled_from([1, 2, 3, 8]),
    capacity=st.sampled_from([1, 2, 3, 5, 1000]),
    routing=st.sampled_from(ROUTINGS),
    lookup=st.sampled_from(LOOKUPS),
    warmup=st.sampled_from([(0, 1), (1, 10), (1, 3), (1, 1)]),
)


@settings(max_examples=300, deadline=None)
@given(traces(), configs)
def test_model_and_kernel_agree(trace: list[Request], config: Config) -> None:
    assert kernel.simulate(Columns.from_requests(trace), config) == model.simulate(trace, config)


@settings(max_examples=100, deadline=None)
@given(traces(), configs)
def test_everything_adds_up(trace: list[Request], config: Config) -> None:
    outcome = kernel.simulate(Columns.from_requests(trace), config)
    phases = [outcome.phase(phase) for phase in PHASES]
    assert sum(row.requests for row in phases) == len(trace)
    assert sum(row.lookups for row in phases) == sum(len(request.hashes) for request in trace)
    for phase, row in zip(PHASES, phases, strict=True):
        assert row.hits + row.attempts == row.lookups
        assert row.cohorts + row.removable == row.attempts
        assert row.dup_attempts >= 2 * row.dup_cohorts
        parts = [each[phase] for each in outcome.instances]
        assert [sum(column) for column in zip(*parts, strict=True)][:N_ADDITIVE] == list(row[:N_ADDITIVE])
    assert sum(fanin * n for hist in outcome.fanin.values() for fanin, n in hist.items()) == sum(
        row.attempts for row in phases
    )


@settings(max_examples=100, deadline=None)
@given(traces(), configs, st.integers(2, 1000))
def test_scaling_time_and_window_together_changes_nothing(
    trace: list[Request], config: Config, k: int
) -> None:
    slower = [request._replace(timestamp_ms=k * request.timestamp_ms) for request in trace]
    scaled = replace(config, w_eff_ms=k * config.w_eff_ms)
    assert kernel.simulate(Columns.from_requests(slower), scaled).instances == (
        kernel.simulate(Columns.from_requests(trace), config).instances
    )


@settings(max_examples=50, deadline=None)
@given(traces(), configs)
def test_with_one_instance_the_routings_are_equal(trace: list[Request], config: Config) -> None:
    columns = Columns.from_requests(trace)
    one, other = (
        kernel.simulate(columns, replace(config, instances=1, routing=routing)) for routing in ROUTINGS
    )
    assert (one.instances, one.fanin) == (other.instances, other.fanin)


@settings(max_examples=100, deadline=None)
@given(traces(), configs)
def test_reuse_within_the_window_bounds_what_can_be_removed(trace: list[Request], config: Config) -> None:
    columns = Columns.from_requests(trace)
    outcome = kernel.simulate(columns, config)
    removable = sum(outcome.phase(phase).removable for phase in PHASES)
    assert removable <= statistics(columns, (config.w_eff_ms,)).within[config.w_eff_ms]


@settings(max_examples=50, deadline=None)
@given(traces())
def test_reuse_gaps_are_those_of_a_plain_loop(trace: list[Request]) -> None:
    last: dict[int, int] = {}
    expected = []
    for request in trace:
        for block in request.hashes:
            if block in last:
                expected.append(request.timestamp_ms - last[block])
            last[block] = request.timestamp_ms
    assert sorted(reuse_gaps(Columns.from_requests(trace)).tolist()) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(traces(), configs)
def test_the_load_log_names_every_cohort(trace: list[Request], config: Config) -> None:
    columns = Columns.from_requests(trace)
    layout = kernel.lay_out(columns, config.instances, config.routing, config.warmup)
    engine = kernel.Kernel(layout)
    outcome = kernel.outcome(
        config,
        *engine.run_arrays(config.w_eff_ms, config.capacity, config.lookup == "contiguous_prefix"),
    )
    n = int(engine.load_first[-1])
    leader = np.repeat(np.arange(len(trace)), np.diff(engine.load_first))
    for phase in (0, 1):
        mine = engine.load_fanin[:n][layout.steady[leader] == phase]
        values, counts = np.unique(mine, return_counts=True)
        assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == outcome.fanin[PHASES[phase]]
