"""The examples run as documented: one against a real store, one with pytest-asyncio and FastAPI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.engine
def test_the_example_reads_each_block_of_a_real_store_once() -> None:
    pytest.importorskip("mooncake", reason="needs a Mooncake store")
    run = subprocess.run(
        [sys.executable, EXAMPLES / "async_store_fetch.py", "--callers", "8", "--shared", "8", "--own", "1"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (distinct,) = re.findall(r"(\d+) distinct", run.stdout)
    (read,) = re.findall(r"with single-flight +\d+ +(\d+)", run.stdout)
    assert read == distinct == "16"
    assert "table empty: True" in run.stdout


def pytest_run(file: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", file],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=file.parent,
    )
    return run.stdout + run.stderr


def test_a_group_lives_in_fixtures_lifespans_and_containers_as_the_example_has_it() -> None:
    pytest.importorskip("fastapi")
    file = EXAMPLES / "async_in_fixtures.py"
    tests = len(re.findall(r"^(?:async )?def test_", file.read_text(), re.MULTILINE))
    said = pytest_run(file)
    assert re.search(rf"^{tests} passed in ", said, re.MULTILINE), said


def test_a_plain_fixture_of_pytest_asyncio_is_told_what_to_do_instead(tmp_path: Path) -> None:
    """Case 13: the test is green; its teardown said "Attempted to exit cancel scope in a different task"."""
    file = tmp_path / "test_plain_fixture.py"
    file.write_text(
        """
import pytest, pytest_asyncio
from singleflight.aio import FlightGroup

async def load(keys):
    return dict.fromkeys(keys, 1)

@pytest_asyncio.fixture
async def flights():
    async with FlightGroup(load) as group:
        yield group

@pytest.mark.asyncio
async def test_green(flights):
    assert await flights.load(["k"]) == {"k": 1}
"""
    )
    said = pytest_run(file)
    assert re.search(r"^1 passed, 1 error in ", said, re.MULTILINE), said
    assert "a flight group is left by the task that entered it" in said
    assert 'docs/aio.md, "Where a group can live"' in said
    assert "cancel scope" not in said
