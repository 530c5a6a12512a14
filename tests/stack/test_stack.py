"""The embedded stack: it starts, it answers, it goes away, and it says what is wrong in one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from singleflight import embedded, tiny_model
from singleflight.embedded import EmbeddedError, Ports, Stack

LOOPBACK = embedded.LOOPBACK


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        sock.listen()
        yield sock.getsockname()[1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_everything_is_gone_after_the_block_also_when_it_raises() -> None:
    with pytest.raises(ZeroDivisionError), contextlib.ExitStack() as block:
        stack = block.enter_context(Stack())
        pids = [stack.master.pid, stack.store_node.pid]
        folder, ports = stack.folder, stack.ports
        assert all(map(alive, pids))
        _ = 1 / 0
    assert not any(map(alive, pids))
    assert not folder.exists()
    for port in (ports.rpc, ports.metadata, ports.metrics):
        with socket.socket() as sock:
            assert sock.connect_ex((LOOPBACK, port)) != 0


def test_two_stacks_run_side_by_side() -> None:
    with Stack() as one, Stack() as two:
        ports = {getattr(s.ports, name) for s in (one, two) for name in ("rpc", "metadata", "metrics")}
        assert len(ports) == 6


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command_that_started_it(how: signal.Signals) -> None:
    """Ctrl-C and kill unwind; for kill -9 the kernel ends the children (PR_SET_PDEATHSIG)."""
    script = (
        "from singleflight import console\n"
        "from singleflight.embedded import Stack\n"
        "import signal\n"
        "with console.orderly(), Stack() as s:\n"
        "    print(s.master.pid, s.store_node.pid, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        watched = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(how)
        assert process.wait(30) != 0
    for pid, fd in zip(pids, watched, strict=True):
        signalled = _ended_within(fd, 30)
        assert signalled, f"process {pid} is still there"


def _ended_within(pidfd: int, seconds: float) -> bool:
    """A pidfd becomes readable when its process ends."""
    import select

    return bool(select.select([pidfd], [], [], seconds)[0])


def test_a_taken_port_is_one_sentence(taken_port: int) -> None:
    with pytest.raises(EmbeddedError) as error, Stack(Ports(rpc=taken_port)):
        pass
    assert str(error.value) == (
        f"port {taken_port} for the master's rpc server cannot be used (Address already in use);"
        " give another one, or 0 to have a free one chosen"
    )


def test_a_missing_mooncake_master_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedError, match=r"mooncake_master is not installed; `pip install"):
        Stack().__enter__()


@pytest.mark.parametrize(
    ("says", "advice"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("No module named 'mooncake'", r"pip install 'kv-singleflight\[cpu\]'"),
    ],
)
def test_a_mooncake_that_does_not_import_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, says: str, advice: str
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mooncake.store":
                raise ImportError(says)

    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(EmbeddedError, match=advice) as error:
        embedded.check_mooncake_imports()
    assert says in str(error.value)


def test_a_master_that_ends_while_starting_is_reported_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "mooncake_master"
    script.write_text("#!/bin/sh\necho no such flag >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(embedded, "master_binary", lambda: str(script))
    with pytest.raises(EmbeddedError) as error, Stack():
        pass
    assert str(error.value) == "mooncake_master ended with code 3 while starting; it said: no such flag"


def test_a_model_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")  # root may write anywhere, but a file is no folder for anyone
    with pytest.raises(tiny_model.ModelError) as error:
        tiny_model.ensure(blocker)
    assert "cannot be written" in str(error.value)
    assert "set KVSF_CACHE" in str(error.value)


def test_a_model_that_cannot_be_built_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "no-transformers"))
    (tmp_path / "no-transformers").mkdir()
    (tmp_path / "no-transformers" / "transformers.py").write_text("raise ImportError('no transformers')")
    with pytest.raises(tiny_model.ModelError, match="no transformers"):
        tiny_model.ensure(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []
