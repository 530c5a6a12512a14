"""One good verdict, its file with one thing changed, and traffic for the gate."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from singleflight.cli.gate import register as register_gate
from singleflight.cli.simulate import register as register_sim
from singleflight.gate import calibration
from singleflight.gate.verdict import Verdict
from tests.sim.conftest import shared  # noqa: F401 - a fixture
from tests.verdicts import yes

DELETE = object()
BLOCK = 32
"""Tokens a block, of the traces here."""

Changed = Callable[..., Path]
Rows = Sequence[tuple[int, Sequence[int]]]
Write = Callable[..., Path]

app = typer.Typer()
register_sim(app)
register_gate(app)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "300"})


def bursts(count: int = 14, fan_in: int = 8, common: int = 40, own: int = 1, every_ms: int = 2000) -> Rows:
    """Every so often `fan_in` prompts within as many ms: blocks in common, and some of their own."""
    return [
        (
            every_ms * burst + member,
            [*range(1000 * burst, 1000 * burst + common)]
            + [10**6 + 1000 * (fan_in * burst + member) + i for i in range(own)],
        )
        for burst in range(count)
        for member in range(fan_in)
    ]


@pytest.fixture(scope="session")
def good() -> Verdict:
    return yes()


@pytest.fixture
def changed(good: Verdict, tmp_path: Path) -> Changed:
    """changed("scope.instances", 0): the path of the good file with that key changed, or deleted."""

    def to_file(key: str, value: Any = DELETE) -> Path:
        path = tmp_path / "verdict.json"
        good.write(path)
        document = json.loads(path.read_text())
        at = document
        *outer, last = key.split(".")
        for name in outer:
            at = at[name]
        if value is DELETE:
            del at[last]
        else:
            at[last] = value
        path.write_text(json.dumps(document))
        return path

    return to_file


def to_file(path: Path, rows: Rows) -> Path:
    """A Mooncake trace of 32-token blocks."""
    lines = (
        {"timestamp": at, "input_length": BLOCK * len(ids), "output_length": 1, "hash_ids": list(ids)}
        for at, ids in rows
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write([(ms, hash ids), ...]): see `to_file`."""
    return lambda rows, name="trace.jsonl": to_file(tmp_path / name, rows)


@pytest.fixture(scope="session")
def bursty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in which loads overlap."""
    return to_file(tmp_path_factory.mktemp("trace") / "bursty.jsonl", bursts())


def calibrated(path: Path, **given: tuple[float, str]) -> Path:
    """A calibration file by hand."""
    figures = {
        name: {"value": value, "unit": unit, "origin": "given"} for name, (value, unit) in given.items()
    }
    path.write_text(json.dumps({"schema": calibration.SCHEMA, "figures": figures}))
    return path


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As in the demo: a link of 50 MB/s, a tiny model with 2 KiB of KV a token."""
    path = tmp_path_factory.mktemp("calibration") / "slow.json"
    return calibrated(path, load_bandwidth=(50e6, "bytes/s"), kv_bytes_per_token=(2048, "bytes/token"))


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loads that are over before a step is."""
    path = tmp_path_factory.mktemp("calibration") / "fast.json"
    return calibrated(path, load_latency=(1e-3, "s"), kv_bytes_per_token=(2048, "bytes/token"))
