"""Arms of a comparison: one engine process each, against one embedded stack."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from .embedded import EmbeddedError, Stack, spawned, tail

STOCK = "MooncakeStoreConnector"
OURS = "SingleFlightMooncakeStoreConnector"
END_S = 10.0
_started = itertools.count()
"""One log for each engine."""


class Serves(Protocol):
    """A stack that engines run against: `embedded.Stack`, or `lmcache_server.LMCacheStack`."""

    folder: Path
    model: Path
    host: str

    def env(self, **more: str) -> dict[str, str]: ...


class Arm:
    """The near end of one engine process (`connector_patch.lab.arm`); `log` is what that says."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], wire: TextIO, log: Path) -> None:
        self.name = name
        self._process = process
        self._wire = wire
        self.log = log

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. EmbeddedError if the process fails at it."""
        try:
            self._wire.write(json.dumps({"command": command, **arguments}) + "\n")
            self._wire.flush()
        except OSError:
            pass  # it has ended; the answer below says so
        return self.answer()

    def answer(self) -> dict[str, Any]:
        line = self._wire.readline()
        if not line:
            self._process.wait(10)
            raise EmbeddedError(f"the engine with {self.name} ended; it said: {tail(self.log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EmbeddedError(f"the engine with {self.name} failed: {answer['error']}")
        return answer


@contextlib.contextmanager
def arm(
    stack: Serves,
    connector: str,
    extra: Mapping[str, Any] | None = None,
    log_level: str = "ERROR",
    model: Path | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Iterator[Arm]:
    """Start an engine with this connector ("none": without one) and `kv_connector_extra_config`, on the
    stack's model or another, and with more of `connector_patch.lab.engine.Engine`'s arguments.

    It answers `ready` on its own time: call `answer()` first. Where our connector passes through it does not
    start.
    """
    near, far = socket.socketpair()
    log = stack.folder / f"engine-{next(_started)}-{connector}.log"
    argv = [sys.executable, "-m", "connector_patch.lab.arm", "--fd", str(far.fileno())]
    argv += ["--model", str(model or stack.model), "--connector", connector]
    argv += ["--extra", json.dumps(extra or {}), "--engine", json.dumps(engine or {})]
    env = stack.env(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL=log_level)
    with near, spawned(argv, env=env, log=log, pass_fds=(far.fileno(),)) as process:
        far.close()
        with near.makefile("rw") as wire:
            yield Arm(connector, process, wire, log)
            near.shutdown(socket.SHUT_RDWR)  # it ends by itself, and with it what it records
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


@contextlib.contextmanager
def both(stack: Stack) -> Iterator[tuple[Arm, Arm]]:
    """Stock and ours, started together and ready."""
    with arm(stack, STOCK) as stock, arm(stack, OURS) as ours:
        stock.answer()
        ours.answer()
        yield stock, ours
