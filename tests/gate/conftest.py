"""One good verdict, and its file with one thing changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from singleflight.quantity import Origin, Quantity
from singleflight.verdict import Fractions, Margin, Rates, Scope, Verdict
from tests.sim.conftest import shared  # noqa: F401 - a fixture

DELETE = object()

Changed = Callable[..., Path]


@pytest.fixture(scope="session")
def good() -> Verdict:
    return Verdict(
        made_at="2026-11-29T21:00:00Z",
        enable=True,
        reasons=["It pays."],
        flips=["A faster store."],
        fractions=Fractions(0.25, 0.5, 0.4),
        rates=Rates(3.0, 60.0, 24.0, 1.5, 0.2, 0.1, 0.0),
        margin=Margin(0.4, 1.2, 2.5),
        scope=Scope(
            trace="burst",
            trace_sha256="ab" * 32,
            requests=1000,
            span_s=300.0,
            block_size_tokens=32,
            model="tiny",
            instances=2,
            capacity_blocks=1000,
            routing="round_robin",
            scale=1.0,
            window_ms=120.5,
            w_eff_ms=121,
            versions={"kv-singleflight": "0.1.0"},
        ),
        figures={"load_latency": Quantity(0.005, "s", Origin.MEASURED)},
    )


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


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write([(ms, hash ids), ...]): a Mooncake trace of 32-token blocks."""

    def to_file(rows: list[tuple[int, list[int]]]) -> Path:
        path = tmp_path / "trace.jsonl"
        lines = (
            {"timestamp": at, "input_length": 32 * len(ids), "output_length": 1, "hash_ids": ids}
            for at, ids in rows
        )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return to_file
