"""The recorder: live arrivals as a Mooncake trace that the simulator and the gate take as it is.

A row needs its output length, so it is written when its request finishes (or is aborted); readers sort.
The scheduler's thread only puts a request's figures into a queue; a thread of our own hashes and writes.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import math
import os
import queue
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from singleflight.files.atomic import replaced
from singleflight.traces.mooncake import MOONCAKE
from singleflight.traces.recording import SCHEMA, header_path
from singleflight.traces.request import Lengths, Observed, Request

WAITING_ROWS: Final = 10_000
"""Requests the queue holds while the disk is slow; more are left out, and counted."""
WAITING_BLOCKS: Final = 2_000_000
"""And their blocks, some 150 MB of hashes."""
HEADER_EVERY_S: Final = 5.0
"""How old the header's load windows may become."""
Row = tuple[float, int, int, Sequence[bytes], Observed | None]
"""As `Recorder.finished` takes it."""
CLOSE_S: Final = 10.0
MODE: Final = 0o600
"""Who may read when people use a service, and how much they say, is whoever runs it."""
NO_LOCKS: Final = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
"""What flock says on a file system without locks: Lustre without -o flock, NFS with nolock."""


def path_of(path: Path, parallel: Any, engine_id: str | None) -> Path:
    """Where an engine records: each of a data-parallel group has its own arrivals, and so its own file.

    Args:
        path: as configured.
        parallel: vLLM's ParallelConfig. For a dense model vLLM makes each rank look like a lone engine
            (`data_parallel_size` 1, rank 0); the index keeps the number.
        engine_id: of the KV transfer config, to which vLLM appends ``_dp<rank>`` in such a group: the one
            thing that tells rank 0 of a dense model from a lone engine.
    """
    index = parallel.data_parallel_index
    if index or parallel.data_parallel_size > 1 or (engine_id or "").endswith("_dp0"):
        return path.with_name(f"{path.name}.dp{index}")
    return path


class Recorder:
    """One per engine. Its file belongs to one process at a time; what was there becomes `path`.1.

    Content cannot be told from a trace: a block's id is a BLAKE2b of its hash under a key that is drawn at
    start and never leaves the process. 53 bits, so that every JSON reader keeps them apart, and no table
    that grows with the run, which numbering the blocks would need. The same block has the same id in `path`
    and `path`.1. A last block that is not full has an id of its own: no other request can share it.

    Args:
        path: the trace; its header is `path`.header.json.
        max_bytes: of one file.
        block_size: tokens a hash covers.
        model: as the engine was told.
        engine: further keys of the header, those of `recording.Header`: what the engine can do.
        windows_ms: gives what the header says about load windows, or None; called by the writing thread.
        on_stop: told once, with the error, if recording ends before `close`.
        warn: told once, a sentence, if the file system has no locks.

    Raises:
        BlockingIOError: another process is recording to this path.
        OSError: it cannot be written, or a link or something else that is no file is in its place.
        ValueError: it is no possible name of a file.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        block_size: int,
        model: str,
        engine: Mapping[str, Any],
        windows_ms: Callable[[], dict[str, float] | None],
        on_stop: Callable[[Exception], None],
        warn: Callable[[str], None],
    ) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self.block_size = block_size
        self._model = model
        self._engine = engine
        self._windows_ms = windows_ms
        self._on_stop = on_stop
        self._warn = warn
        self._warned = False
        self._started = time.time()
        self._salt = secrets.token_bytes(32)
        self._rows = self._dropped = self._resumable = 0
        self._taken = self._written = 0  # hashes, counted by the scheduler's thread and by ours
        self._ended = False
        self._queue: queue.Queue[Row | None] = queue.Queue(WAITING_ROWS)
        self._file = self._opened()
        try:
            self._write_header(path)
        except BaseException:
            os.close(self._file)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-singleflight-recorder", daemon=True)
        self._thread.start()

    def finished(
        self,
        arrived: float,
        prompt_tokens: int,
        output_tokens: int,
        hashes: Sequence[bytes],
        observed: Observed | None = None,
    ) -> None:
        """A request is over. `arrived`: seconds since the epoch; `hashes`: of the prompt's full blocks."""
        if self._ended or self._taken - self._written > WAITING_BLOCKS:
            self._dropped += 1
            return
        try:
            self._queue.put_nowait((arrived, prompt_tokens, output_tokens, hashes, observed))
            self._taken += len(hashes)
        except queue.Full:
            self._dropped += 1

    def left_out(self) -> None:
        """A streaming-input request is over. It came in pieces, and of those only the last has a time: vLLM
        moves `arrival_time` along. One row of all its blocks at that time would be an arrival that never was,
        so it is counted and has none."""
        self._resumable += 1

    def close(self) -> None:
        """Write what is waiting, and end. A second call does nothing."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)

    # -- the writing thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        fresh = True
        told = time.monotonic()
        try:
            while True:
                batch = self._waiting(HEADER_EVERY_S)
                rows = [self._row(*item) for item in batch if item is not None]
                self._written += sum(len(item[3]) for item in batch if item is not None)
                if rows:
                    self._append("".join(rows).encode())
                    fresh = False
                ended = None in batch
                if ended or (not fresh and time.monotonic() - told >= HEADER_EVERY_S):
                    self._write_header(self.path)
                    fresh, told = True, time.monotonic()
                if ended:
                    break
        except Exception as error:
            self._on_stop(error)
        finally:
            self._ended = True
            with contextlib.suppress(queue.Empty):
                while True:  # or what waits would stay in memory until the server ends
                    self._queue.get_nowait()
            if self._file >= 0:
                os.close(self._file)

    def _waiting(self, timeout_s: float) -> list[Row | None]:
        """Everything in the queue: one write for all that has come since the last."""
        batch = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._queue.get(timeout=timeout_s))
            while len(batch) < WAITING_ROWS:
                batch.append(self._queue.get_nowait())
        return batch

    def _row(
        self,
        arrived: float,
        prompt_tokens: int,
        output_tokens: int,
        hashes: Sequence[bytes],
        observed: Observed | None,
    ) -> str:
        ids = [self._id(each) for each in hashes]
        blocks = -(-prompt_tokens // self.block_size)
        ids += (self._id(f"{self._rows}/{i}".encode()) for i in range(len(ids), blocks))
        self._rows += 1
        at_ms = max(round((arrived - self._started) * 1000), 0)
        row = Request(at_ms, ids, Lengths(prompt_tokens, output_tokens), observed)
        return MOONCAKE.encode(0, row, "ms") + "\n"

    def _id(self, content: bytes) -> int:
        return int.from_bytes(blake2b(content, digest_size=8, key=self._salt).digest()) >> 11

    # -- the files ---------------------------------------------------------------------------------------

    def _opened(self) -> int:
        """The file, empty, locked and ours."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for _ in range(2):
            try:
                file = os.open(self.path, flags, MODE)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise self._no_file() from None
                raise
            try:
                about = os.fstat(file)
                if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                    raise self._no_file()
                self._lock(file)
                if not os.fstat(file).st_size:
                    os.fchmod(file, MODE)  # if it was there, empty
                    return file
                self._put_aside()
            except BaseException:
                os.close(file)
                raise
            os.close(file)
        raise BlockingIOError(f"{self.path} is written by another process")

    def _no_file(self) -> OSError:
        return OSError(errno.ELOOP, "is a link or no regular file", str(self.path))

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            if not self._warned:
                self._warned = True
                self._warn(
                    f"the file system of {self.path} has no locks ({error.strerror});"
                    " see to it that no other process records to this path"
                )

    def _put_aside(self) -> None:
        aside = Path(f"{self.path}.1")
        for each in (aside, header_path(str(aside)), header_path(str(self.path))):
            _refuse_link(each)
        self.path.replace(aside)
        with contextlib.suppress(FileNotFoundError):
            header_path(str(self.path)).replace(header_path(str(aside)))

    def _append(self, data: bytes) -> None:
        """Whole rows in one write: whoever reads, or a crash, finds no half row in the middle."""
        size = os.fstat(self._file).st_size
        if size and size + len(data) > self._max_bytes:
            self._write_header(self.path)
            os.close(self._file)
            self._file = -1
            self._file = self._opened()
            self._write_header(self.path)
            size = 0
        if (written := os.write(self._file, data)) < len(data):
            os.ftruncate(self._file, size)
            raise OSError(f"only {written} of {len(data)} bytes could be written")

    def _write_header(self, path: Path) -> None:
        started = datetime.datetime.fromtimestamp(self._started, datetime.UTC)
        header: dict[str, Any] = {
            "schema": SCHEMA,
            "block_size_tokens": self.block_size,
            "model": self._model,
            "started_at": started.isoformat(timespec="milliseconds"),
            "dropped_requests": self._dropped,
            "resumable_requests": self._resumable,
            "load_windows_ms": self._windows_ms(),
            **self._engine,
        }
        _refuse_link(header_path(str(path)))
        with replaced(header_path(str(path)), MODE) as raw:
            raw.write((json.dumps(header, indent=2) + "\n").encode())


def _refuse_link(path: Path) -> None:
    """OSError if a symbolic link is there. Renaming would not follow it, but somebody put it there."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a link", str(path))


def quantiles_ms(seen: int, windows_s: Sequence[float]) -> dict[str, float] | None:
    """What the header says about load windows: `count` of all seen; p50, p99 (nearest rank) and max, ms, of
    the latest ones. None before the first."""
    if not windows_s:
        return None
    ordered = sorted(windows_s)

    def rank(share: float) -> float:
        return round(ordered[math.ceil(share * len(ordered)) - 1] * 1000, 3)

    return {"count": seen, "p50": rank(0.5), "p99": rank(0.99), "max": rank(1)}
