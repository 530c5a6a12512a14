"""A real Mooncake on loopback for the demo, the tests and the benchmarks.

`Stack` starts a `mooncake_master` with its HTTP metadata server and one store node, a process of its own
that holds every object, waits until both answer, and takes everything down again on success, failure and
Ctrl-C. Should this process be killed outright, or the first process of a tree, its keeper ends the rest
(`keeper.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from . import keeper, tiny_model, wheels

LOOPBACK = "127.0.0.1"
READY_TIMEOUT_S = 60.0
"""How long a process may take to answer; a start takes about a second here."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class EmbeddedError(RuntimeError):
    """The stack cannot start; the message is one sentence for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on one address; 0 means: choose a free one."""

    rpc: int = 0
    metadata: int = 0
    metrics: int = 0

    def chosen(self, host: str = LOOPBACK) -> Ports:
        """All three settled. EmbeddedError names a wished-for port that is taken."""
        sockets = []
        try:
            for name in ("rpc", "metadata", "metrics"):
                wish = getattr(self, name)
                sock = socket.socket()
                sockets.append(sock)
                try:
                    sock.bind((host, wish))
                except OSError as error:
                    raise EmbeddedError(
                        f"port {wish} for the master's {name} server cannot be used ({error.strerror});"
                        " give another one, or 0 to have a free one chosen"
                    ) from None
            return Ports(*(sock.getsockname()[1] for sock in sockets))
        finally:
            for sock in sockets:
                sock.close()


def free_ports(host: str, count: int) -> list[int]:
    """So many TCP ports that nobody listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((host, 0))
        return [sock.getsockname()[1] for sock in sockets]


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def spawned(
    argv: list[str],
    *,
    log: Path,
    env: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
    stop_timeout_s: float = 10.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process in a session of its own, its output in `log`, ended with the block.

    It is asked with SIGTERM first, and killed with its whole session if it does not end in time. Whatever
    else ends first, this process or the child, nothing of the session outlives it (`keeper.py`).
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=_die_with_parent,
        )
    guard = None
    try:
        guard = keeper.start(process.pid)
        yield process
    finally:
        _end(process, stop_timeout_s)
        if guard is not None:
            guard.kill()
            guard.wait()


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """SIGTERM, then SIGKILL to what is left of the session that `spawned` made for it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    # Once it has been waited for, its number may be another session's.
    if process.returncode is None or process.pid not in keeper.members(process.pid):
        keeper.kill_session(process.pid)
    process.wait()


def wait_until(
    ready: Callable[[], bool],
    process: subprocess.Popen[bytes],
    what: str,
    log: Path,
    timeout_s: float = READY_TIMEOUT_S,
) -> None:
    """Ask until `ready()`; EmbeddedError if the process ends first or the time is up."""
    limit = time.monotonic() + timeout_s
    while not ready():
        code = process.poll()
        if code is not None:
            raise EmbeddedError(f"{what} ended with code {code} while starting; it said: {tail(log)}")
        if time.monotonic() > limit:
            raise EmbeddedError(f"{what} did not answer within {timeout_s:.0f} s; it said: {tail(log)}")
        time.sleep(0.02)


def tail(log: Path, lines: int = 3) -> str:
    """The last lines of a log in one line, for an error message."""
    text = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in text[-lines:]) or "(nothing)"


def answers_http(url: str, wanted: int | None = None) -> bool:
    """Whether anything answers there; with `wanted`, whether it answers that."""
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return wanted in (None, answer.status)
    except urllib.error.HTTPError:
        return wanted is None  # it refuses the question, so it is there
    except OSError:
        return False


def answers_tcp(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def master_binary() -> str:
    """Where `mooncake_master` is: beside this Python, or on PATH. EmbeddedError if nowhere."""
    beside = Path(sys.executable).parent / "mooncake_master"
    found = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if found is None:
        raise EmbeddedError(
            "mooncake_master is not installed; `pip install 'kv-singleflight[cpu]'`"
            " (on a GPU host: [gpu], or [gpu-cuda13]) brings it"
        )
    return found


def check_mooncake_imports() -> None:
    """EmbeddedError with what is missing, and who brings it, if `mooncake.store` does not import."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        raise EmbeddedError(f"mooncake does not import: {error}; {wheels.hint(error)}") from None


def engine_env(folder: Path, host: str, **more: str) -> dict[str, str]:
    """The environment for a process that runs vLLM, with its sockets in `folder`; `more` wins.

    One hash seed for all, since block hashes must agree between processes; everything on `host`.
    """
    sockets = tempfile.mkdtemp(prefix="s", dir=folder)  # one engine's sockets never meet another's
    return {
        **os.environ,
        "VLLM_HOST_IP": host,
        "VLLM_RPC_BASE_PATH": sockets,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        **more,
    }


@dataclass
class Stack:
    """`with Stack() as stack:` a running master and store node, and a tiny model to serve.

    Attributes:
        ports: the master's; see `Ports`.
        segment_mb: memory of the store node, MiB; the only place where objects are.
        folder: logs, sockets and the Mooncake JSON; removed at the end.
        host: address of the master and of the engines.
        node_host: address of the store node.
        node_enter: command that the store node is started through, such as `ip netns exec NAME`, to have it
            at the far end of a link; `host` must be reachable from there.
        model: folder of the tiny model, made once and cached (`tiny_model.py`).
    """

    ports: Ports = field(default_factory=Ports)
    segment_mb: int = 1024
    local_buffer_mb: int = 64
    host: str = LOOPBACK
    node_host: str = LOOPBACK
    node_enter: tuple[str, ...] = ()
    folder: Path = field(init=False)
    model: Path = field(init=False)
    master: subprocess.Popen[bytes] = field(init=False)
    store_node: subprocess.Popen[bytes] = field(init=False)
    _exit: contextlib.ExitStack = field(init=False, repr=False)

    def __enter__(self) -> Stack:
        binary = master_binary()
        check_mooncake_imports()
        self.model = tiny_model.ensure()
        with contextlib.ExitStack() as exit_stack:
            # Short, because vLLM puts UNIX sockets there and their paths have a limit.
            self.folder = Path(tempfile.mkdtemp(prefix="kvsf-"))
            exit_stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.ports = self.ports.chosen(self.host)
            self._write_config()
            self.master = exit_stack.enter_context(self._start_master(binary))
            self.store_node = exit_stack.enter_context(self._start_store_node())
            self._exit = exit_stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, trace)

    @property
    def config_path(self) -> Path:
        """The Mooncake JSON for engines: `MOONCAKE_CONFIG_PATH`."""
        return self.folder / "mooncake.json"

    def env(self, **more: str) -> dict[str, str]:
        """The environment for a process that runs vLLM against this stack (`engine_env`)."""
        return engine_env(
            self.folder,
            self.host,
            **{
                "MOONCAKE_CONFIG_PATH": str(self.config_path),
                "MC_TCP_BIND_ADDRESS": self.host,
                "MC_LOG_LEVEL": "ERROR",
                "GLOG_minloglevel": "2",
                **more,
            },
        )

    def _write_config(self) -> None:
        engine = {
            "metadata_server": f"http://{self.host}:{self.ports.metadata}/metadata",
            "master_server_address": f"{self.host}:{self.ports.rpc}",
            "protocol": "tcp",
            "device_name": "",
            # The engine brings no memory of its own: all objects are on the store node.
            "mode": "standalone-store",
            "global_segment_size": 0,
            "local_buffer_size": self.local_buffer_mb << 20,
        }
        self.config_path.write_text(json.dumps(engine, indent=2))
        node = {
            **engine,
            "mode": "embedded",
            "local_hostname": self.node_host,
            "global_segment_size": self.segment_mb << 20,
        }
        (self.folder / "node.json").write_text(json.dumps(node, indent=2))

    @contextlib.contextmanager
    def _start_master(self, binary: str) -> Iterator[subprocess.Popen[bytes]]:
        ports, log = self.ports, self.folder / "master.log"
        argv = [
            binary,
            f"--rpc_address={self.host}",
            f"--rpc_port={ports.rpc}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_host={self.host}",
            f"--http_metadata_server_port={ports.metadata}",
            f"--metrics_host={LOOPBACK}",
            f"--metrics_port={ports.metrics}",
        ]
        with spawned(argv, log=log) as process:
            metadata = f"http://{self.host}:{ports.metadata}/metadata?key=ready"
            wait_until(
                lambda: answers_tcp(self.host, ports.rpc) and answers_http(metadata),
                process,
                "mooncake_master",
                log,
            )
            yield process

    @contextlib.contextmanager
    def _start_store_node(self) -> Iterator[subprocess.Popen[bytes]]:
        log, ready = self.folder / "store_node.log", self.folder / "store_node.ready"
        argv = [
            *self.node_enter,
            sys.executable,
            "-m",
            "singleflight.stack.store_node",
            str(self.folder / "node.json"),
            "--ready",
            str(ready),
        ]
        with spawned(argv, log=log, env=self.env(MC_TCP_BIND_ADDRESS=self.node_host)) as process:
            wait_until(ready.exists, process, "the store node", log)
            yield process
