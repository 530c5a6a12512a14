"""What a sweep has finished so far, on disk, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from singleflight.files.atomic import replaced
from singleflight.sim.columns import Columns
from singleflight.sim.config import PHASES, Config
from singleflight.sim.counts import Counts, Outcome
from singleflight.sweep.grid import Task, code_version


def trace_key(sha256: str, columns: Columns) -> str:
    """Identify a trace as simulated: the file, and the requests that the reading options made of it."""
    digest = hashlib.sha256(sha256.encode())
    for values in (columns.times, columns.offsets, columns.blocks, columns.hashes):
        digest.update(values.tobytes())
    return digest.hexdigest()


class Parts:
    """A folder with one file a finished task.

    A part is used only if its content matches its own digest, and trace and code are the ones at hand;
    anything else in the folder is left alone and simulated again.

    Args:
        folder: made when the first part is saved.
        keys: `trace_key` of each trace, by its index.
        cohorts: whether a part without its cohort file is of no use.
    """

    def __init__(self, folder: Path, keys: list[str], cohorts: bool) -> None:
        self.folder = folder
        self.keys = keys
        self.cohorts = cohorts

    def name(self, task: Task) -> str:
        """File name, without suffix, of a task's part."""
        what = repr((self.keys[task.trace], code_version(), task.configs))
        return hashlib.sha256(what.encode()).hexdigest()[:32]

    def cohort_file(self, task: Task) -> Path:
        return self.folder / f"{self.name(task)}.parquet"

    def save(self, task: Task, outcomes: tuple[Outcome, ...]) -> None:
        """Keep a finished task, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        body: dict[str, Any] = {
            "trace": self.keys[task.trace],
            "code": code_version(),
            "outcomes": [_pack(outcome) for outcome in outcomes],
        }
        if self.cohorts:
            body["cohorts"] = file_digest(self.cohort_file(task))
        text = json.dumps(body)
        self.folder.mkdir(parents=True, exist_ok=True)
        with replaced(self.folder / f"{self.name(task)}.json") as out:
            out.write(f"{_digest(text.encode())}\n{text}".encode())

    def load(self) -> Iterator[tuple[int, tuple[Outcome, ...], Path | None]]:
        """(trace index, outcomes, cohort file) of every usable part."""
        for path in sorted(self.folder.glob("*.json")):
            # What matches its digest is of our making; whatever else stands there is no part.
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
                if (part := self._load(path)) is not None:
                    yield part

    def _load(self, path: Path) -> tuple[int, tuple[Outcome, ...], Path | None] | None:
        if not path.is_file():  # a pipe would be waited for
            return None
        digest, _, text = path.read_text(errors="replace").partition("\n")
        if digest != _digest(text.encode()):
            return None
        body = json.loads(text)
        if body["code"] != code_version() or body["trace"] not in self.keys:
            return None
        cohort_file = None
        if self.cohorts:
            cohort_file = path.with_suffix(".parquet")
            if not cohort_file.is_file() or body.get("cohorts") != file_digest(cohort_file):
                return None
        outcomes = tuple(_unpack(each) for each in body["outcomes"])
        return self.keys.index(body["trace"]), outcomes, cohort_file

    def tidy(self) -> int:
        """Delete what a killed worker left half-written. Returns how many finished parts there are."""
        for path in self.folder.glob(".*.part"):
            if path.is_file():
                path.unlink()
        return len(list(self.folder.glob("*.json")))

    def remove(self) -> None:
        """Delete the folder, once the content of the parts is in the report."""
        shutil.rmtree(self.folder, ignore_errors=True)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _pack(outcome: Outcome) -> dict[str, Any]:
    return {
        "config": outcome.config.as_json(),
        "instances": [[each[phase] for phase in PHASES] for each in outcome.instances],
        "fanin": [sorted(outcome.fanin[phase].items()) for phase in PHASES],
    }


def _unpack(packed: dict[str, Any]) -> Outcome:
    config = Config(**{**packed["config"], "warmup": tuple(packed["config"]["warmup"])})
    instances = tuple(
        {phase: Counts(*row) for phase, row in zip(PHASES, rows, strict=True)} for rows in packed["instances"]
    )
    fanin = {phase: dict(map(tuple, rows)) for phase, rows in zip(PHASES, packed["fanin"], strict=True)}
    return Outcome(config, instances, fanin)
