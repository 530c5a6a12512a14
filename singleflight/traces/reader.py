"""Open a trace of any known format and yield its requests; every fault is a `TraceError` with file and
line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from singleflight.files import shown
from singleflight.traces import lengths_only
from singleflight.traces.bailian import BAILIAN
from singleflight.traces.errors import BadLine, Fraction, TraceError
from singleflight.traces.jsonl import parse_object
from singleflight.traces.mooncake import MOONCAKE
from singleflight.traces.parquet import ParquetRows, is_parquet
from singleflight.traces.request import Request
from singleflight.traces.rows import Format, Reading, Unit, parse_request, timestamp_of
from singleflight.traces.sessions import Sessions
from singleflight.traces.source import MAX_LINE, Source, stem

FORMATS: dict[str, Format] = {form.name: form for form in (MOONCAKE, BAILIAN)}

KNOWN_FIELDS = frozenset(
    name for form in FORMATS.values() for name in (*form.required, *form.optional, *form.foreign)
)

FEW = 20
"""Requests below which a rate says nothing about the unit."""
FAST_PER_S = 50.0
"""Mean arrivals a second above which a trace is more likely one whose seconds were read as milliseconds."""
SLOW_PER_S = 1 / 60
"""And below which it is more likely one whose milliseconds were read as seconds, or microseconds as
milliseconds."""
LONG_GAP = 0.5
"""Share of the trace's span that one gap between rows may be. Beyond it, the rates are those of the gap."""
NAMED = 8
"""Ignored fields that a notice names."""


@dataclass(frozen=True)
class Options:
    """How to read a trace.

    Attributes:
        format: a name of `FORMATS`, or ``auto``: the one the fields of the first readable row belong to.
        unit: what timestamps count, instead of what the format declares. Given as ``ms``, fractions of a
            millisecond are rounded down; declared by the format alone, they are an error, since they may
            as well be seconds.
        block_size: tokens a hash id covers, instead of what the format declares.
        skip_bad: this many bad lines are left out and reported; one more is an error.
        sort: sort by timestamp, stably, instead of calling a row that goes back in time bad. Holds the
            trace in memory.
        recording: rows as the connector's recorder wrote them, when requests finished: sorted without a
            word, and a last row that a crash has cut off is left out with one.
        strict: fields that the format does not know are an error; otherwise one notice names them.
    """

    format: str = "auto"
    unit: Unit | None = None
    block_size: int | None = None
    skip_bad: int = 0
    sort: bool = False
    recording: bool = False
    strict: bool = False


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
        self._how: Reading | None = None
        self._sessions = Sessions()
        self._ignored: dict[str, None] = {}
        self._readings: str | None = None
        self._longest_gap_ms = 0

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
            elif request.timestamp_ms - self.last_ms > self._longest_gap_ms:
                self._longest_gap_ms = request.timestamp_ms - self.last_ms
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
        with self._opened() as source:
            for line, record in source.records():
                try:
                    request = self._parse(line, record)
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

    def _opened(self) -> Source | ParquetRows:
        if not is_parquet(self.path):
            return Source(self.path)
        rows = ParquetRows(self.path, KNOWN_FIELDS)
        self._refuse_lengths_only(",".join(rows.names).encode(errors="replace"))
        return rows

    def _refuse_lengths_only(self, header: bytes) -> None:
        try:
            lengths_only.refuse(header)
        except BadLine as fault:  # of the whole file: no number of skipped lines mends it
            raise TraceError(self.path, 1, fault.wrong, fault.accepted) from None

    def _parse(self, line: int, record: bytes | dict[str, Any] | BadLine | None) -> Request:
        if line == 1 and isinstance(record, bytes):
            self._refuse_lengths_only(record)
        row = _object(record)
        how = self._how or self._reading(FORMATS.get(self.options.format) or _form_of(row))
        try:
            request, ignored = parse_request(row, how, self._sessions)
        except Fraction as fault:
            raise BadLine(f"{fault.wrong}{self._as_either_unit()}", fault.accepted) from None
        self._ignored.update(dict.fromkeys(ignored))
        self._how, self.form = how, how.form
        return request

    def _reading(self, form: Format) -> Reading:
        return Reading(
            form,
            self.options.unit or form.unit,
            self.options.block_size or form.block_size,
            fractions=self.options.unit is not None,
            strict=self.options.strict,
        )

    def _as_either_unit(self) -> str:
        """What the trace's span and rate are if timestamps are seconds, and if they are milliseconds; nothing
        where the file cannot be read twice."""
        if self._readings is None:
            self._readings = ""
            if (ends := self._ends()) is not None and (span := ends[1] - ends[0]) > 0:
                self._readings = ": the trace spans " + " or ".join(
                    f"{_short(s)} s ({_short(ends[2] / s)} requests a second) if timestamps are {unit}"
                    for unit, s in (("seconds", span), ("milliseconds", span / 1000))
                )
        return self._readings

    def _ends(self) -> tuple[float, float, int] | None:
        """First and last timestamp as they stand there, and the number of rows."""
        if not os.path.isfile(self.path):
            return None
        first, number = None, 0
        latest: bytes | dict[str, Any] | BadLine | None = None
        try:
            with self._opened() as source:
                for number, latest in source.records():
                    if number == 1:
                        first = timestamp_of(_object(latest))
                last = timestamp_of(_object(latest))
        except (TraceError, BadLine):
            return None
        return (first, last, number) if first is not None and last is not None else None

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
        if self._ignored:
            names = [shown.text(name) for name in self._ignored][:NAMED]
            more = f" and {len(self._ignored) - NAMED} more" if len(self._ignored) > NAMED else ""
            self.notices.append(
                f"{self.path}: fields that change nothing here were ignored: {', '.join(names)}{more}"
            )
        span_s = (self.last_ms - self.first_ms) / 1000
        read = f"{self.path}: {self.requests} requests over {span_s:g} s, timestamps read as {self.unit}; "
        if self.requests >= FEW and self.requests > FAST_PER_S * span_s:
            other = "if they are seconds, say --unit s" if self.unit == "ms" else "is the unit right?"
            self.notices.append(read + other)
        elif self.requests >= FEW and self.requests < SLOW_PER_S * span_s:
            other = "if they are milliseconds, say --unit ms" if self.unit == "s" else "is the unit right?"
            self.notices.append(read + other)

        gap_s = self._longest_gap_ms / 1000
        if self.requests >= FEW and gap_s > LONG_GAP * span_s:
            self.notices.append(
                f"{self.path}: no request for {gap_s:g} s of the {span_s:g} s: if rows of another clock are"
                " among them, or an idle time, every rate here is wrong; cut the trace there"
            )

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


def _object(record: bytes | dict[str, Any] | BadLine | None) -> dict[str, Any]:
    """A record of either kind of file as an object. Raises BadLine: it is none."""
    if record is None:
        raise BadLine(f"is longer than {MAX_LINE // 2**20} MiB", "one JSON object a line")
    if isinstance(record, BadLine):
        raise record
    return parse_object(record) if isinstance(record, bytes) else record


def _short(number: float) -> str:
    return f"{number:,.4g}" if number < 10_000 else f"{number:,.0f}"


def _form_of(row: dict[str, Any]) -> Format:
    return BAILIAN if "chat_id" in row else MOONCAKE


def read(path: str, options: Options = Options()) -> list[Request]:
    """All requests of a trace.

    Raises:
        TraceError: as `TraceReader`.
    """
    return list(TraceReader(path, options))
