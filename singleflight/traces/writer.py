"""Write a trace file: compressed by its name, complete or not there at all."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from singleflight.files.atomic import replaced
from singleflight.traces.errors import TraceError
from singleflight.traces.request import Request
from singleflight.traces.rows import Format, Unit


def write(path: str, requests: Iterable[Request], form: Format, unit: Unit | None = None) -> int:
    """Write requests as `form`, to a file (``.gz`` and ``.zst`` compressed) or, for ``-``, standard output.

    Args:
        unit: what timestamps shall count, instead of what the format declares.

    Returns:
        How many were written. If anything fails, `path` is as it was before.

    Raises:
        OSError: it cannot be written.
        TraceError: a request lacks what the format needs.
    """
    written = 0
    with _output(path) as out:
        for written, request in enumerate(requests, 1):
            if form.needs_output and request.lengths.output is None:
                raise TraceError(
                    path,
                    written,
                    f"the request has no output_length, which {form.name} rows need",
                    "traces that have them all, or --output-length N",
                )
            out.write((form.encode(written - 1, request, unit or form.unit) + "\n").encode())
    return written


@contextmanager
def _output(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with replaced(Path(path)) as raw:
        if path.endswith(".gz"):
            # No name and no time in the header: the same trace gives the same bytes.
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                yield packed  # type: ignore[misc] # GzipFile is a binary file in all but its base class
        elif path.endswith(".zst"):
            import zstandard

            with zstandard.ZstdCompressor().stream_writer(raw, closefd=False) as packed:
                yield packed
        else:
            with io.BufferedWriter(raw) as buffered:
                yield buffered
