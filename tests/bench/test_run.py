"""The benchmark itself, end to end and as short as it gets: two servers, one workload, one pair, no root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bench.ab", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ})


@pytest.mark.engine
@pytest.mark.slow
def test_a_burst_of_eight_through_stock_and_attach(tmp_path: Path) -> None:
    run = bench(
        "--no-link", "--arms", "attach", "--quick", "--only", "burst of 8", "--pairs", "1", "--most", "1",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "1 workloads in" in run.stdout
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["finished"]
    assert data["link"].startswith("No real link (asked for by --no-link)")
    (cell,) = data["cells"]
    assert cell["requests"] == 8
    stock, attach = (cell["arms"][arm]["counts"] for arm in ("stock", "attach"))
    # Whoever comes while a load runs attaches to it, whoever comes later finds the prefix local.
    assert attach["gets"] == 1
    assert attach["get_bytes"] == pytest.approx(4096 * 2048, rel=1e-3)  # results are rounded
    assert stock["gets"] > 1
    assert (tmp_path / "report.html").exists()


def test_an_unknown_arm_is_answered_with_those_there_are() -> None:
    run = bench("--arms", "stock,atach")
    assert run.returncode == 2
    assert "'atach' is no arm; accepted are stock, off" in " ".join(run.stderr.replace("│", " ").split())
