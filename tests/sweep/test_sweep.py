"""The sweep as a computation: what is on disk is used if it can be trusted; every backend gives the same."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from singleflight.sim.columns import Columns
from singleflight.sim.config import PHASES, Config
from singleflight.sim.counts import Counts, Outcome
from singleflight.sweep import parts as parts_module
from singleflight.sweep import tables
from singleflight.sweep.backend import BackendError, workers
from singleflight.sweep.grid import Grid, Task, tasks
from singleflight.sweep.parts import Parts
from singleflight.sweep.run import ReconcileError, reconcile, sweep
from singleflight.traces.synth import Synth, generate

GRID = Grid(windows=(10, 60, 1000), instances=(1, 3), capacities=(50, 5000))
N_CONFIGS = 3 * 2 * 2 * 2 * 2


@pytest.fixture(scope="module")
def columns() -> Columns:
    return Columns.from_requests(generate(Synth("agents", requests=600, seed=5, fan_in=4)))


class Here:
    """Runs joblib calls in this process and remembers their tasks."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.ran: list[Task] = []
        self.fail_after = fail_after

    def __call__(self, calls: Iterable[Any]) -> Iterator[Any]:
        for function, args, options in calls:
            if self.fail_after is not None and len(self.ran) >= self.fail_after:
                raise KeyboardInterrupt
            self.ran.append(args[0])
            yield function(*args, **options)

    @property
    def configs(self) -> int:
        return sum(len(task.configs) for task in self.ran)


def run(
    columns: Columns, folder: Path, submit: Any, grid: Grid = GRID, cohorts: bool = False
) -> list[Outcome]:
    return sweep([columns], grid, Parts(folder, ["the trace"], cohorts), submit)[0].outcomes


def test_the_outcomes_are_in_the_order_of_the_grid(columns: Columns, tmp_path: Path) -> None:
    outcomes = run(columns, tmp_path, Here())
    configs = [outcome.config for outcome in outcomes]
    assert configs == GRID.configs()
    assert len(configs) == N_CONFIGS
    points = [(c.w_eff_ms, c.instances, c.capacity, c.routing == "affinity") for c in configs]
    assert points == sorted(points)


def test_the_order_axes_are_given_in_does_not_matter() -> None:
    shuffled = Grid((1000, 10, 60), (3, 1), (5000, 50), ("affinity", "round_robin"))
    assert shuffled == GRID


def test_the_published_grid_has_420_configurations() -> None:
    configs = Grid().configs()
    assert len(configs) == len(set(configs)) == 420
    assert 2 * sum(config.instances for config in configs) == 5208


@pytest.mark.parametrize("n_lookups", [1, 10_000, 3_000_000, 10**9])
def test_tasks_cover_every_configuration_once(n_lookups: int) -> None:
    made = list(tasks(0, Grid().configs(), n_lookups))
    assert sorted(config for task in made for config in task.configs) == sorted(Grid().configs())
    for task in made:
        assert len({(config.instances, config.routing) for config in task.configs}) == 1
    assert len(made) == {1: 10, 10_000: 10, 3_000_000: 130, 10**9: 420}[n_lookups]


def test_an_interrupted_sweep_goes_on_from_the_disk(columns: Columns, tmp_path: Path) -> None:
    whole = run(columns, tmp_path / "whole", Here())
    with pytest.raises(KeyboardInterrupt):
        run(columns, tmp_path / "parts", Here(fail_after=2))
    rest = Here()
    assert run(columns, tmp_path / "parts", rest) == whole
    assert rest.configs == N_CONFIGS - 2 * 12
    nothing = Here()
    assert run(columns, tmp_path / "parts", nothing) == whole
    assert nothing.ran == []


def test_a_larger_grid_uses_the_parts_of_a_smaller_one(columns: Columns, tmp_path: Path) -> None:
    run(columns, tmp_path, Here())
    more = Here()
    run(columns, tmp_path, more, dataclasses.replace(GRID, windows=(10, 60, 200, 1000)))
    assert {config.w_eff_ms for task in more.ran for config in task.configs} == {200}


def first_part(folder: Path) -> Path:
    return sorted(folder.glob("*.json"))[0]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "binary"])
def test_a_damaged_part_is_simulated_again(columns: Columns, tmp_path: Path, damage: str) -> None:
    whole = run(columns, tmp_path, Here())
    part = first_part(tmp_path)
    data = part.read_bytes()
    part.write_bytes(
        {
            "cut": data[:-20],
            "changed": data.replace(b'"capacity": 50', b'"capacity": 51', 1),
            "empty": b"",
            "binary": bytes(range(256)),
        }[damage]
    )
    again = Here()
    assert run(columns, tmp_path, again) == whole
    assert again.configs == 12


def test_a_part_of_other_code_or_another_trace_is_not_used(
    columns: Columns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(columns, tmp_path, Here())
    again = Here()
    sweep([columns], GRID, Parts(tmp_path, ["another trace"], False), again)
    assert again.configs == N_CONFIGS
    monkeypatch.setattr(parts_module, "code_version", lambda: "newer")
    again = Here()
    run(columns, tmp_path, again)
    assert again.configs == N_CONFIGS


def test_the_trace_key_is_of_the_requests_too(columns: Columns) -> None:
    # The same file read with other options is another trace.
    late = dataclasses.replace(columns, times=columns.times * 1000)
    assert parts_module.trace_key("sha", columns) != parts_module.trace_key("sha", late)
    assert parts_module.trace_key("sha", columns) != parts_module.trace_key("other", columns)


def test_a_part_without_its_cohort_file_is_not_used(columns: Columns, tmp_path: Path) -> None:
    run(columns, tmp_path, Here(), cohorts=True)
    files = sorted(tmp_path.glob("*.parquet"))
    assert len(files) == 4
    files[0].unlink()
    files[1].write_bytes(b"PAR1")
    again = Here()
    run(columns, tmp_path, again, cohorts=True)
    assert again.configs == 2 * 12


def test_cohort_rows(columns: Columns, tmp_path: Path) -> None:
    parts = Parts(tmp_path, ["the trace"], True)
    grid = Grid((60, 1000), (3,), (50,))
    swept = sweep([columns], grid, parts, Here())[0]
    assert len(swept.cohort_files) == 2  # a task each: two routings
    rows = [row for file in swept.cohort_files for row in pq.read_table(file).to_pylist()]
    found: dict[Config, dict[str, dict[int, int]]] = {
        config: {phase: {} for phase in PHASES} for config in grid.configs()
    }
    hashes = set(columns.hashes.tolist())
    for row in rows:
        config = Config(*(row[name] for name in tables.AXES))
        hist = found[config][row["phase"]]
        hist[row["fanin"]] = hist.get(row["fanin"], 0) + 1
        leader = row["leader"]
        blocks = columns.blocks[columns.offsets[leader] : columns.offsets[leader + 1]]
        assert row["hash"] in columns.hashes[blocks]
        assert row["opened_ms"] == columns.times[leader]
        key = leader if row["routing"] == "round_robin" else int(columns.hashes[blocks[0]])
        assert row["instance"] == key % row["instances"]
        assert row["hash"] in hashes
    for outcome in swept.outcomes:
        assert found[outcome.config] == outcome.fanin


def broken(outcome: Outcome, **changes: int) -> Outcome:
    first = outcome.instances[0]
    wrong = {**first, "steady": first["steady"]._replace(**changes)}
    return dataclasses.replace(outcome, instances=(wrong, *outcome.instances[1:]))


@pytest.mark.parametrize(
    "name", ["requests", "lookups", "hits", "attempts", "removable", "cohorts", "max_fanin"]
)
def test_counts_that_do_not_add_up_are_not_reported(columns: Columns, tmp_path: Path, name: str) -> None:
    outcomes = run(columns, tmp_path, Here(), Grid((60,), (3,), (50,)))
    reconcile(outcomes, columns)
    value = getattr(outcomes[0].instances[0]["steady"], name)
    with pytest.raises(ReconcileError):
        reconcile([broken(outcomes[0], **{name: value + 1000})], columns)


def test_a_worker_with_other_code_is_refused(columns: Columns, tmp_path: Path) -> None:
    def elsewhere(calls: Iterable[Any]) -> Iterator[Any]:
        for done in Here()(calls):
            yield dataclasses.replace(done, code="older")

    with pytest.raises(BackendError, match="another version"):
        run(columns, tmp_path, elsewhere)
    assert list(tmp_path.glob("*.json")) == []


def test_loky_and_dask_give_the_same_rows(columns: Columns, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    expected = run(columns, tmp_path / "here", Here())
    with workers("loky", None, 2) as submit:
        assert run(columns, tmp_path / "loky", submit) == expected
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
        ) as cluster,
        workers("dask", cluster.scheduler_address, -1) as submit,
    ):
        outcomes = run(columns, tmp_path / "dask", submit)
    assert outcomes == expected
    assert [list(tables.rows(name, outcomes)) for name in tables.TABLES] == [
        list(tables.rows(name, expected)) for name in tables.TABLES
    ]


@pytest.mark.parametrize(
    ("backend", "address", "said"),
    [
        ("loky", "tcp://127.0.0.1:1", "--address goes with --backend dask or ray"),
        ("dask", None, "needs --address"),
    ],
)
def test_an_unusable_backend_says_why(backend: Any, address: str | None, said: str) -> None:
    with pytest.raises(BackendError, match=said), workers(backend, address, 1):
        pass


@pytest.mark.parametrize(
    ("backend", "module", "extra"), [("ray", "ray", "sim-ray"), ("dask", "dask", "sim-dask")]
)
def test_a_backend_that_is_not_installed_says_what_to_install(
    backend: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with (
        pytest.raises(BackendError, match=rf"pip install 'kv-singleflight\[{extra}\]'"),
        workers(backend, "auto", 1),
    ):
        pass


def test_parts_round_trip(columns: Columns, tmp_path: Path) -> None:
    config = Config(5, 2, 7, "affinity", "independent_blocks", (1, 3))
    counts = {phase: Counts(*range(i, i + 10)) for i, phase in enumerate(PHASES)}
    outcome = Outcome(config, (counts, counts), {"warmup": {1: 5, 70: 1}, "steady": {}})
    parts = Parts(tmp_path, ["k0", "k1"], False)
    parts.save(Task(1, (config,)), (outcome,))
    assert list(parts.load()) == [(1, (outcome,), None)]
    assert json.loads(first_part(tmp_path).read_text().partition("\n")[2])["trace"] == "k1"


def test_columns_refuse_what_is_no_trace() -> None:
    good = list(generate(Synth(requests=3)))
    for bad in ([], [good[0]._replace(hashes=[])], [good[2], good[0]._replace(timestamp_ms=0)]):
        with pytest.raises(ValueError, match=r"request|blocks"):
            Columns.from_requests(bad)
    assert np.array_equal(Columns.from_requests(good).offsets, [0, 16, 32, 48])
