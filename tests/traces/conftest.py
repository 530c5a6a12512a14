"""Short ways to write a trace file and to read it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., str]


def row(**changes: Any) -> dict[str, Any]:
    """A good Mooncake row; a change to ... takes the field out."""
    whole = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2], **changes}
    return {name: value for name, value in whole.items() if value is not ...}


@pytest.fixture
def good_row() -> Callable[..., dict[str, Any]]:
    return row


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write lines (bytes as they are, anything else as JSON) to a file; returns its path."""

    def to_file(*lines: Any, name: str = "trace.jsonl", end: bytes = b"\n") -> str:
        path = tmp_path / name
        path.write_bytes(
            b"".join((each if type(each) is bytes else json.dumps(each).encode()) + end for each in lines)
        )
        return str(path)

    return to_file
