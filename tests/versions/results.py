"""What the scripts have found, as JSON; docs/_ext/releases.py makes tables of it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from bench.ab.results import environment
from singleflight.files.atomic import replaced

FOLDER = Path(__file__).parents[2] / "bench" / "results"


def stamp() -> dict[str, Any]:
    """When, and on what; the vLLM installed here is not the one that was run."""
    now = datetime.datetime.now(datetime.UTC)
    there = {name: what for name, what in environment().items() if not name.startswith("vllm")}
    return {"made_at": now.isoformat(timespec="seconds"), "environment": there}


def read(path: Path) -> dict[str, Any]:
    """Version -> what was found there; empty if there is no such file yet."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    with replaced(path) as file:
        file.write((json.dumps(found, indent=1) + "\n").encode())


def put(path: Path, version: str, row: dict[str, Any]) -> None:
    """Beside those of other versions, which stay as they are."""
    rows = {**read(path), version: row}
    write(path, {name: rows[name] for name in sorted(rows, key=Version)})
