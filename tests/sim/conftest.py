"""Where the shared vectors and traces are, and short ways to make and run a trace."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository that holds the vectors and traces, or the one KVSF_SHARED names."""
    named = os.environ.get("KVSF_SHARED")
    folder = Path(named) if named else ROOT.parent / "shared"
    if not (folder / "sim-vectors.json").is_file():
        pytest.skip(f"no sim-vectors.json in {folder}: set KVSF_SHARED to the folder that has it")
    return folder
