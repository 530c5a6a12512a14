"""The example runs as documented, against a real store."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "async_store_fetch.py"


@pytest.mark.engine
def test_the_example_reads_each_block_of_a_real_store_once() -> None:
    pytest.importorskip("mooncake", reason="needs a Mooncake store")
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "--callers", "8", "--shared", "8", "--own", "1"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (distinct,) = re.findall(r"(\d+) distinct", run.stdout)
    (read,) = re.findall(r"with single-flight +\d+ +(\d+)", run.stdout)
    assert read == distinct == "16"
    assert "table empty: True" in run.stdout
