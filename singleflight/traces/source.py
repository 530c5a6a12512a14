"""Bytes of a trace, from a file or standard input, decompressed, hashed as they are read, a bounded line at
a time."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from singleflight.traces.errors import TraceError
from singleflight.traces.parquet import MAGIC as PARQUET

Codec = Literal["plain", "gzip", "zstd"]

MAX_LINE = 16 * 2**20
"""Bytes of the longest line accepted. A prompt of a million tokens in 16-token blocks is 1.4 MB of 20-digit
ids."""

_MAGIC: dict[Codec, bytes] = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_SUFFIX: dict[str, Codec] = {".gz": "gzip", ".zst": "zstd"}


def stem(path: str) -> str:
    """The trace's name in reports and folders: file name without suffixes; ``stdin`` for ``-``."""
    if path == "-":
        return "stdin"
    name = Path(path).name
    for suffix in _SUFFIX:
        name = name.removesuffix(suffix)
    return Path(name).stem


class _Hashed(io.RawIOBase):
    """Passes bytes through and hashes them: the digest is of the file as stored, in the same one pass
    (stdin, pipes)."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self.sha256.update(data)
        return len(data)


class _Zstd(io.RawIOBase):
    """zstd frames, decompressed. Unlike the library's own reader this one notices a truncated end."""

    # A zstd block of a few bytes can stand for 128 KiB: a small feed bounds what one step can blow up to
    # (32 MiB).
    FEED = 1024

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._new_frame = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._raw = raw
        self._in = b""
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            self._in = self._in or self._raw.read(self.FEED)
            if not self._in:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._out = memoryview(self._frame.decompress(self._in))
            except self._error as fault:
                raise EOFError(str(fault)) from None
            self._in = b""
            if self._frame.eof:
                self._in, self._frame = self._frame.unused_data, None
        n = min(len(buffer), len(self._out))
        buffer[:n] = self._out[:n]
        self._out = self._out[n:]
        return n


class Source:
    """An open trace. Use as a context manager, iterate `records` once; then `sha256` is known.

    Args:
        path: a file, ``.gz`` and ``.zst`` decompressed, or ``-``: standard input, whose compression is told
            by its first bytes.

    Raises:
        TraceError: missing, a directory, unreadable, or named for another compression than it has.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.cut_off = False
        """The line yielded last had no newline."""
        try:
            if path != "-":
                _refuse_endless(path)
            raw = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115 - closed in __exit__
        except OSError as fault:
            raise TraceError(path, None, _plain(fault), "a trace file that can be read") from None
        except TraceError:
            raise
        except ValueError:  # a NUL or a lone surrogate in the name
            raise TraceError(path, None, "is not a possible file name", "a trace file") from None
        self._raw = raw
        self._hashed = _Hashed(raw)
        self._buffered = io.BufferedReader(self._hashed, 2**16)

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        if self.path != "-":
            self._raw.close()

    @property
    def sha256(self) -> str:
        """Of the bytes as stored, complete once `records` is exhausted."""
        return self._hashed.sha256.hexdigest()

    def records(self) -> Iterator[tuple[int, bytes | None]]:
        """Physical lines from 1, without their newline; None in place of a line over `MAX_LINE`, which is
        never held.

        Raises:
            TraceError: reading or decompressing failed.
        """
        number = 0
        try:
            stream = self._decompressed()
            while line := stream.readline(MAX_LINE + 1):
                number += 1
                if line.endswith(b"\n"):
                    yield number, line[:-1]
                elif len(line) <= MAX_LINE:
                    self.cut_off = True
                    yield number, line
                else:
                    while (rest := stream.readline(2**16)) and not rest.endswith(b"\n"):
                        pass
                    yield number, None
            while self._buffered.read(2**20):  # what a decompressor left unread belongs to the digest too
                pass
        except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
            raise TraceError(
                self.path,
                number + 1,
                f"the compressed data is damaged or cut off ({_plain(fault)})",
                "a complete file",
            ) from None
        except OSError as fault:
            raise TraceError(self.path, number + 1, _plain(fault), "a trace file that can be read") from None

    def _decompressed(self) -> io.BufferedReader[Any] | gzip.GzipFile:
        head = self._buffered.peek(4)[:4]
        if head == PARQUET:
            raise TraceError(
                self.path, 1, "a Parquet file, not by its name but as a stream", "the path of a Parquet file"
            )
        found: Codec = next((codec for codec, magic in _MAGIC.items() if head.startswith(magic)), "plain")
        named: Codec = _SUFFIX.get(Path(self.path).suffix, "plain")
        if self.path != "-" and os.path.isfile(self.path) and head and found != named:
            raise TraceError(
                self.path,
                1,
                f"the content is {found}, the name says {named}",
                "plain files, gzip as .gz, zstd as .zst",
            )
        if self.path.endswith(".parquet") and os.path.isfile(self.path):
            raise TraceError(self.path, 1, "the content is not Parquet, the name says so", "Parquet files")
        if found == "gzip":
            return gzip.GzipFile(fileobj=self._buffered)
        if found == "zstd":
            return io.BufferedReader(_Zstd(self._buffered), 2**16)
        return self._buffered


def _refuse_endless(path: str) -> None:
    """Directories, and devices, which may have no end. Pipes are fine: a shell gives one for <(command)."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise TraceError(path, None, "is a directory", "a trace file")
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise TraceError(
            path, None, "is a device or a socket", "a trace file, a pipe, or - for standard input"
        )


def _plain(fault: BaseException) -> str:
    return (isinstance(fault, OSError) and fault.strerror) or str(fault) or type(fault).__name__
