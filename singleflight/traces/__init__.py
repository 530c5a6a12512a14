"""Trace formats: readers and writers, one file a format; every reader yields `Request`.

Standard library only, except `zstandard` for ``.zst`` files and `pyarrow` for Parquet, each imported when one
is opened.
"""

from singleflight.traces.errors import TraceError
from singleflight.traces.request import Lengths, Request

__all__ = ["Lengths", "Request", "TraceError"]
