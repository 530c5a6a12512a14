"""Model and kernel against the worked examples and the random traces, to the last count."""

import json
from pathlib import Path
from typing import Any

import pytest

from singleflight.sim import kernel, model
from singleflight.sim.columns import Columns
from singleflight.sim.config import PHASES, Config
from singleflight.traces.request import Lengths, Request

# The vectors' own list of per-instance figures.
INSTANCE_FIELDS = ("requests", "lookups", "attempts", "removable", "cohorts", "max_fanin")


def requests_of(case: dict[str, Any]) -> list[Request]:
    return [Request(t, blocks, Lengths(1, 1)) for t, blocks in zip(case["t"], case["blocks"], strict=True)]


def config_of(case: dict[str, Any]) -> Config:
    return Config(**{**case["config"], "warmup": tuple(case["config"]["warmup"])})


@pytest.fixture(scope="module")
def vectors(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "sim-vectors.json").read_text())


def both(requests: list[Request], config: Config) -> list[dict[str, Any]]:
    return [
        model.simulate(requests, config).as_json(),
        kernel.simulate(Columns.from_requests(requests), config).as_json(),
    ]


def test_the_file_has_what_it_is_said_to_have(vectors: dict[str, Any]) -> None:
    assert len(vectors["worked"]) == 19
    assert [len(trace["cases"]) for trace in vectors["traces"]] == [4] * 100


@pytest.mark.parametrize("index", range(19))
def test_worked_example(vectors: dict[str, Any], index: int) -> None:
    case = vectors["worked"][index]
    for outcome in both(requests_of(case), config_of(case)):
        for phase, expected in case["expected"].items():
            assert {name: outcome[phase][name] for name in expected} == expected, case["name"]


@pytest.mark.parametrize("index", range(100))
def test_random_trace(vectors: dict[str, Any], index: int) -> None:
    trace = vectors["traces"][index]
    for case in trace["cases"]:
        for outcome in both(requests_of(trace), config_of(case)):
            for phase in PHASES:
                expected = case["phases"][phase]
                assert {name: outcome[phase][name] for name in expected} == expected
            instances = [
                [[each[phase][name] for name in INSTANCE_FIELDS] for phase in PHASES]
                for each in outcome["instances"]
            ]
            assert instances == case["instances"]
