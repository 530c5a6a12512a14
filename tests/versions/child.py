"""A process that reports in JSON lines: heard while it runs, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

EVERY_S = 0.3
TO = "SINGLEFLIGHT_REPORT_TO"
"""The variable that names the file."""


class ChildError(Exception):
    """It did not end as it should; what it said last."""


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    told: Callable[[dict[str, Any]], None],
    ends: Sequence[int] = (0,),
) -> None:
    """Run it to its end; `told` hears each line. ChildError if it ends in none of `ends`."""
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        report, output = Path(folder, "report"), Path(folder, "output")
        report.touch()
        with output.open("wb") as said, report.open() as lines:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env={**env, TO: str(report)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = None
                while code is None:
                    try:
                        code = process.wait(EVERY_S)
                    except subprocess.TimeoutExpired:
                        code = None
                    _hear(lines, told)
            finally:
                _end(process)
        if code not in ends:
            tail = output.read_text(errors="replace").strip()[-3000:]
            raise ChildError(f"`{' '.join(argv)}` ended with {code}:\n{tail}")


def _hear(lines: TextIO, told: Callable[[dict[str, Any]], None]) -> None:
    while True:
        place = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(place)
            return
        told(json.loads(line))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def say(**what: object) -> None:
    """In the child: one line."""
    with open(os.environ[TO], "a") as report:
        report.write(json.dumps(what) + "\n")
