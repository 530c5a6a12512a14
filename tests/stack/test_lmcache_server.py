"""The embedded LMCache, without starting it: what a person is told, and what is left behind."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from singleflight.stack import lmcache_server
from singleflight.stack.embedded import EmbeddedError


def test_without_lmcache_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedError, match="pip install --no-deps lmcache"), lmcache_server.LMCacheStack():
        pass


def test_shared_memory_of_engines_that_were_killed_is_removed_and_of_no_others() -> None:
    """LMCache's own naming; the second engine lives (it is this process)."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    started = time.time() - 1
    names = [f"{lmcache_server.SEGMENT_NAME}{pid}_0" for pid in (ended.pid, os.getpid())]
    dead, alive = (lmcache_server.SEGMENTS / name for name in names)
    try:
        for path in (dead, alive):
            path.write_bytes(b"kv")
        assert dict(lmcache_server.segments()).keys() >= {dead, alive}
        lmcache_server.remove_segments(started)
        assert not dead.exists()
        assert alive.exists()
    finally:
        for path in (dead, alive):
            path.unlink(missing_ok=True)
