"""Open a trace of any known format and yield its requests; every fault is a `TraceError` with file and
line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from singleflight.traces import lengths_only
from singleflight.traces.bailian import BAILIAN
from singleflight.traces.errors import BadLine, TraceError
from singleflight.traces.jsonl import Format, Unit, parse_object, parse_request
from singleflight.traces.mooncake import MOONCAKE
from singleflight.traces.request import Request
from singleflight.traces.source import MAX_LINE, Source, stem

FORMATS: dict[str, Format] = {form.name: form for form in (MOONCAKE, BAILIAN)}

FEW = 20
"""Requests below which a rate says nothing about the unit."""
FAST_PER_S = 50.0
"""Mean arrivals a second above which a trace is more likely one whose seconds were read as milliseconds."""
SLOW_PER_S = 1 / 60
"""And below which it is more likely one whose milliseconds were read as seconds, or microseconds as
milliseconds."""


@dataclass(frozen=True)
class Options:
    """How to read a trace.

    Attributes:
        format: a name of `FORMATS`, or ``auto``: the one the fields of the first readable row belong to.
        unit: what timestamps count, instead of what the format declares.
        block_size: tokens a hash id covers, instead of what the format declares.
        skip_bad: this many bad lines are left out and reported; one more is an error.
        sort: sort by timestamp, stably, instead of calling a row that goes back in time bad. Holds the
            trace in memory.
        recording: rows as the connector's recorder wrote them, when requests finished: sorted without a
            word, and a last row that a crash has cut off is left out with one.
    """

    format: str = "auto"
    unit: Unit | None = None
    block_size: int | None = None
    skip_bad: int = 0
    sort: bool = False
    recording: bool = False


class TraceReader:
    """Iterate once over the requests of a trace, in timestamp order, ties in file order (R1).

    The attributes are complete when the iteration is.

    Attributes:
        name: see `source.stem`.
        form, unit, block_size: the format, and what timestamps and hash ids were taken to count (None
            before a row).
        sha256: hex digest of the file as stored.
        requests: how many were yielded.
        first_ms, last_ms: their range.
        skipped: the bad lines left out.
        notices: sentences a user should see.

    Raises (while iterating):
        TraceError: the file, or one bad line more than `Options.skip_bad`.
    """

    def __init__(self, path: str, options: Options = Options()) -> None:
        if options.format not in ("auto", *FORMATS):
            raise ValueError(f"format {options.format!r}; accepted: auto, {', '.join(FORMATS)}")
        if options.block_size is not None and options.block_size < 1:
            raise ValueError(f"block size {options.block_size}; accepted: 1 or more tokens")
        if options.skip_bad < 0:
            raise ValueError(f"skip-bad {options.skip_bad}; accepted: 0 or more lines")
        self.path = path
        self.name = stem(path)
        self.options = options
        self.form: Format | None = FORMATS.get(options.format)
        self.sha256 = ""
        self.requests = 0
        self.first_ms = self.last_ms = 0
        self.skipped: list[TraceError] = []
        self.notices: list[str] = []

    @property
    def unit(self) -> Unit | None:
        return self.options.unit or (self.form.unit if self.form else None)

    @property
    def block_size(self) -> int | None:
        return self.options.block_size or (self.form.block_size if self.form else None)

    def __iter__(self) -> Iterator[Request]:
        rows = self._sorted() if self.options.sort or self.options.recording else self._in_order()
        for request in rows:
            if not self.requests:
                self.first_ms = request.timestamp_ms
            self.last_ms = request.timestamp_ms
            self.requests += 1
            yield request
        if not self.requests:
            raise TraceError(self.path, None, "holds no request", "at least one row")
        self._notice()

    def _sorted(self) -> Iterator[Request]:
        rows = [request for _, request in self._parsed()]
        in_order = sorted(rows, key=lambda request: request.timestamp_ms)
        if in_order != rows and not self.options.recording:
            self.notices.append(f"{self.path}: rows were not in timestamp order; sorted, ties in file order")
        yield from in_order

    def _in_order(self) -> Iterator[Request]:
        last = 0
        for line, request in self._parsed():
            if request.timestamp_ms < last:
                self._bad(
                    line,
                    BadLine(
                        f"timestamp {request.timestamp_ms} ms is before the row above it ({last} ms)",
                        "rows in timestamp order, or --sort",
                    ),
                )
                continue
            last = request.timestamp_ms
            yield request

    def _parsed(self) -> Iterator[tuple[int, Request]]:
        with Source(self.path) as source:
            for line, raw in source.lines():
                try:
                    request = self._parse(line, raw)
                except BadLine as fault:
                    if self.options.recording and source.cut_off:
                        self.notices.append(
                            f"{self.path}:{line}: left out: the recording ends within this row"
                        )
                        continue
                    self._bad(line, fault)
                else:
                    yield line, request
            self.sha256 = source.sha256

    def _parse(self, line: int, raw: bytes | None) -> Request:
        if raw is None:
            raise BadLine(f"is longer than {MAX_LINE // 2**20} MiB", "one JSON object a line")
        if line == 1:
            try:
                lengths_only.refuse(raw)
            except BadLine as fault:  # of the whole file: no number of skipped lines mends it
                raise TraceError(self.path, line, fault.wrong, fault.accepted) from None
        row = parse_object(raw)
        form = self.form or (BAILIAN if "chat_id" in row else MOONCAKE)
        request = parse_request(
            row, form, self.options.unit or form.unit, self.options.block_size or form.block_size
        )
        self.form = form
        return request

    def _bad(self, line: int, fault: BadLine) -> None:
        error = TraceError(self.path, line, fault.wrong, fault.accepted)
        if len(self.skipped) >= self.options.skip_bad:
            if self.skipped:
                error.add_note(f"{len(self.skipped)} bad lines before it were skipped, as --skip-bad allows")
            raise error
        self.skipped.append(error)

    def _notice(self) -> None:
        if self.skipped:
            self.notices.append(
                f"{self.path}: left out {len(self.skipped)} bad lines of --skip-bad {self.options.skip_bad}"
            )
            self.notices += [f"left out {each}" for each in self.skipped[:5]]
        span_s = (self.last_ms - self.first_ms) / 1000
        read = f"{self.path}: {self.requests} requests over {span_s:g} s, timestamps read as {self.unit}; "
        if self.requests >= FEW and self.requests > FAST_PER_S * span_s:
            other = "if they are seconds, say --unit s" if self.unit == "ms" else "is the unit right?"
            self.notices.append(read + other)
        elif self.requests >= FEW and self.requests < SLOW_PER_S * span_s:
            other = "if they are milliseconds, say --unit ms" if self.unit == "s" else "is the unit right?"
            self.notices.append(read + other)

    def about(self) -> dict[str, Any]:
        """What was read and how, for reports; complete when the iteration is."""
        return {
            "path": self.path,
            "sha256": self.sha256,
            "format": self.form.name if self.form else None,
            "unit": self.unit,
            "block_size": self.block_size,
            "sorted": self.options.sort or self.options.recording,
            "requests": self.requests,
            "first_ms": self.first_ms,
            "last_ms": self.last_ms,
            "skipped": [str(each) for each in self.skipped],
        }


def read(path: str, options: Options = Options()) -> list[Request]:
    """All requests of a trace.

    Raises:
        TraceError: as `TraceReader`.
    """
    return list(TraceReader(path, options))
