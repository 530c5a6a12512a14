"""Rows of a Parquet trace: the columns are the fields of the JSON-lines formats, under the same names.

Read a batch at a time by pyarrow, imported when a file is opened.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from decimal import Decimal
from types import TracebackType
from typing import Any

from singleflight.files import shown
from singleflight.traces.errors import BadLine, TraceError

MAGIC = b"PAR1"
BATCH_ROWS = 1024


def is_parquet(path: str) -> bool:
    """Whether a regular file starts as Parquet does. False for what cannot be read: opening it says why."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class ParquetRows:
    """An open Parquet trace, with what `source.Source` has.

    Args:
        path: a regular file.
        known: the columns to read. Others are in the rows with ... as their value: there, and not read.

    Raises:
        TraceError: it cannot be opened as Parquet, or has a column twice.
        ModuleNotFoundError: pyarrow is not installed.
    """

    cut_off = False

    def __init__(self, path: str, known: Collection[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        # Arrow's own are OSError, ValueError and MemoryError, too.
        self._faults = (pyarrow.ArrowException, OSError, ValueError, MemoryError)
        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
            names = self._file.schema_arrow.names
        except self._faults as fault:
            raise self._damaged(fault) from None
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise TraceError(path, 1, f"column {shown.text(twice)!r} appears twice", "each column once")
        self.names: list[str] = names
        self._columns = [name for name in names if name in known]
        self._others: dict[str, Any] = dict.fromkeys((name for name in names if name not in known), ...)

    def __enter__(self) -> ParquetRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        """Of the file as stored."""
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def records(self) -> Iterator[tuple[int, dict[str, Any] | BadLine]]:
        """Rows from 1, as the JSON-lines reader would have them, or what is wrong with one.

        Raises:
            TraceError: reading failed.
        """
        number = 0
        batches = self._file.iter_batches(BATCH_ROWS, columns=self._columns)
        while True:
            try:
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            except self._faults as fault:
                raise self._damaged(fault, number + 1) from None
            if batch is None:
                return
            for row in rows:
                number += 1
                yield number, _as_json(row) if not self._others else _as_json({**row, **self._others})

    def _damaged(self, fault: Exception, line: int = 1) -> TraceError:
        why = shown.text((str(fault) or type(fault).__name__).splitlines()[0], 200)
        return TraceError(
            self.path, line, f"the Parquet data is damaged or cut off ({why})", "a complete file"
        )


def _as_json(row: dict[str, Any]) -> dict[str, Any] | BadLine:
    """Numbers as JSON's reader gives them. Whole floats are lengths: pandas has no others beside nulls."""
    for name, value in row.items():
        if type(value) is float:
            if value != value or value in (float("inf"), float("-inf")):
                return BadLine(f"{shown.text(name)} is {value}", "finite numbers, or null")
            if name.endswith("_length") and value.is_integer():
                row[name] = int(value)
            else:
                row[name] = Decimal(repr(value))
    return row
