"""A real LMCache on loopback, in the place of a Mooncake store: one `lmcache server`, and a tiny model.

The server keeps what engines store in its memory. `lmcache_driven` has it write into an engine's KV cache
itself, as on a GPU; on a CPU the KV cache is shared memory for that (`segments`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from . import tiny_model
from .embedded import (
    LOOPBACK,
    EmbeddedError,
    answers_http,
    answers_tcp,
    engine_env,
    free_ports,
    spawned,
    wait_until,
)

CONNECTOR = "LMCacheMPConnector"
WRAPPER = "SingleFlightConnector"
MODULE = "connector_patch.lab.lmcache"
"""Where the connector is found: with vLLM's CPU wheel, its own module does not do."""
START_S = 300.0
"""The server imports torch and more before it answers; some ten seconds here."""
SEGMENTS = Path("/dev/shm")
SEGMENT_NAME = "lmcache_kv_"
"""What LMCache 0.5.6 calls the shared memory of an engine: this, its process id, and a number."""


def check_installed() -> None:
    """EmbeddedError with the way to get it, if LMCache is not here."""
    if importlib.util.find_spec("lmcache") is None:
        raise EmbeddedError(
            "lmcache is not installed; `pip install 'kv-singleflight[lmcache]'`, then"
            " `pip install --no-deps lmcache==0.5.6` (docs/lmcache.md says why in two steps)"
        )


@dataclass
class LMCacheStack:
    """`with LMCacheStack() as stack:` a running server, and a tiny model to serve.

    Attributes:
        chunk_tokens: LMCache's unit of storing and loading.
        memory_gb: what the server may keep.
        folder: logs and sockets; removed at the end.
        model: folder of the tiny model.
        server: the running server; `start` puts a new one in its place.
    """

    chunk_tokens: int = 64
    memory_gb: int = 1
    host: str = LOOPBACK
    folder: Path = field(init=False)
    model: Path = field(init=False)
    server: subprocess.Popen[bytes] = field(init=False)
    _exit: contextlib.ExitStack = field(init=False, repr=False)
    _running: contextlib.ExitStack = field(init=False, repr=False)

    def __enter__(self) -> LMCacheStack:
        check_installed()
        self.model = tiny_model.ensure()
        with contextlib.ExitStack() as exit_stack:
            exit_stack.callback(remove_segments, time.time())
            # Short, because vLLM puts UNIX sockets there and their paths have a limit.
            self.folder = Path(tempfile.mkdtemp(prefix="kvsf-"))
            exit_stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.port, self._http = free_ports(self.host, 2)
            self._running = contextlib.ExitStack()
            exit_stack.callback(self.stop)
            self.start()
            self._exit = exit_stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, trace)

    def start(self) -> None:
        """An empty server on the same ports."""
        log = self.folder / "lmcache.log"
        self.server = self._running.enter_context(spawned(self._argv(), log=log, env=self._server_env()))
        health = f"http://{self.host}:{self._http}/healthcheck"
        wait_until(
            lambda: answers_tcp(self.host, self.port) and answers_http(health, 200),
            self.server,
            "lmcache server",
            log,
            START_S,
        )

    def stop(self) -> None:
        """End the server, and forget what it has."""
        self._running.close()

    def _argv(self) -> list[str]:
        beside = Path(sys.executable).parent / "lmcache"
        return [
            *([str(beside)] if beside.exists() else [sys.executable, "-m", "lmcache.cli.main"]),
            "server",
            *("--host", self.host, "--port", str(self.port)),
            *("--http-host", self.host, "--http-port", str(self._http)),
            *("--l1-size-gb", str(self.memory_gb), "--eviction-policy", "LRU"),
            *("--chunk-size", str(self.chunk_tokens), "--supported-transfer-mode", "auto"),
        ]

    def _server_env(self) -> dict[str, str]:
        return {**os.environ, **QUIET}

    @property
    def metrics_url(self) -> str:
        """Where the server counts what it does."""
        return f"http://{self.host}:{self._http}/metrics"

    def settings(self, **more: Any) -> dict[str, Any]:
        """`kv_connector_extra_config` of an `LMCacheMPConnector` against this server."""
        mine = {
            "host": f"tcp://{self.host}",
            "port": self.port,
            "mp_transfer_mode": "lmcache_driven",
            "mq_timeout": 30,
            **more,
        }
        return {f"lmcache.mp.{name}": value for name, value in mine.items()}

    def alone(self, **more: Any) -> dict[str, Any]:
        """`--kv-transfer-config` of an engine with LMCache's connector."""
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.settings(**more),
        }

    def wrapped(self, singleflight: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """The same in ours."""
        return {
            "kv_connector": WRAPPER,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connector": self.alone(**more),
                "singleflight": dict(singleflight or {"mode": "attach"}),
            },
        }

    def env(self, **more: str) -> dict[str, str]:
        """The environment for a process that runs vLLM against this stack (`engine_env`)."""
        return engine_env(self.folder, self.host, **{**QUIET, **more})


QUIET = {
    # LMCache reports its use to its makers unless told not to.
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}


def segments() -> Iterator[tuple[Path, int]]:
    """The shared memory of engines, and the process id of each."""
    for path in SEGMENTS.glob(f"{SEGMENT_NAME}*"):
        pid = path.name.removeprefix(SEGMENT_NAME).partition("_")[0]
        if pid.isdigit():
            yield path, int(pid)


def remove_segments(since: float) -> None:
    """What engines that were killed have left behind: LMCache removes its segments only where Python ends."""
    for path, pid in segments():
        with contextlib.suppress(OSError):
            if not Path(f"/proc/{pid}").exists() and path.stat().st_mtime >= since:
                path.unlink()
