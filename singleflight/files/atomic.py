"""Write a file that is complete or not there at all."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path, mode: int | None = None) -> Iterator[io.FileIO]:
    """A temporary file beside `path` that takes its place at the end; removed if anything fails.

    Args:
        mode: its permissions; None: what the umask leaves.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    temporary = Path(name)
    try:
        with open(handle, "wb", buffering=0) as raw:
            yield raw
        if mode is None:
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask  # mkstemp's 0600 is for secrets
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
