"""The embedded stack: it starts, it answers, it goes away, and it says what is wrong in one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from singleflight.stack import embedded, keeper, tiny_model, wheels
from singleflight.stack.embedded import EmbeddedError, Ports, Stack

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
    """Ctrl-C and kill unwind; for kill -9 there is the keeper."""
    script = (
        "from singleflight.terminal import console\n"
        "from singleflight.stack.embedded import Stack\n"
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


TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# What vLLM has: a child in a process group of its own that ignores a polite request, and a grandchild.
child = "import os, signal, subprocess, sys, time; os.setpgid(0, 0);" \
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);" \
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""
OWNER = f"""
import sys, time
from pathlib import Path
from singleflight.stack.embedded import spawned
with spawned([sys.executable, "-c", {TREE!r}], log=Path(sys.argv[1]), stop_timeout_s=0.1) as process:
    print(process.pid, flush=True)
    time.sleep(600)
"""


def _until(reached: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has spawned a tree of three, and the tree's session."""
    argv = [sys.executable, "-c", OWNER, str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        session = int(process.stdout.readline())
        try:
            _until(lambda: len(keeper.members(session)) == 3, "the tree did not grow")
            yield process, session
        finally:
            process.kill()
            keeper.kill_session(session)


def test_a_whole_tree_ends_when_the_one_who_started_it_is_killed_outright(
    owner: tuple[subprocess.Popen[str], int],
) -> None:
    process, session = owner
    process.kill()
    _until(lambda: not keeper.members(session), "somebody is left of the tree")


def test_a_whole_tree_ends_when_its_first_process_is_killed_outright(
    owner: tuple[subprocess.Popen[str], int],
) -> None:
    process, session = owner
    os.kill(session, signal.SIGKILL)
    _until(lambda: not keeper.members(session), "somebody is left of the tree")
    assert process.poll() is None, "whoever started it goes on"


def test_a_whole_tree_ends_with_the_block_though_its_keeper_has_been_killed(
    owner: tuple[subprocess.Popen[str], int],
) -> None:
    process, session = owner
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    guards = [int(pid) for pid in children if int(pid) != session]
    assert len(guards) == 1
    os.kill(guards[0], signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    _until(lambda: not keeper.members(session), "somebody is left of the tree")


def test_no_keeper_outlives_what_it_keeps(owner: tuple[subprocess.Popen[str], int]) -> None:
    process, session = owner
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    watched = [os.pidfd_open(int(pid)) for pid in children if int(pid) != session]
    process.kill()
    assert all(_ended_within(fd, 30) for fd in watched)


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


LACKS = "{}: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("says", "installed", "advice"),
    [
        (LACKS.format("libibverbs.so.1"), [wheels.NO_CUDA], "`apt-get install libibverbs1`"),
        (LACKS.format("libmlx5.so.1"), [wheels.CUDA_12], "`apt-get install ibverbs-providers`"),
        (
            LACKS.format("libcudart.so.12"),
            [wheels.CUDA_12],
            "`pip uninstall mooncake-transfer-engine`, then `pip install 'kv-singleflight[gpu-cuda13]'`",
        ),
        (
            LACKS.format("libcudart.so.13"),
            [wheels.CUDA_13],
            "`pip uninstall mooncake-transfer-engine-cuda13`, then `pip install 'kv-singleflight[gpu]'`",
        ),
        (LACKS.format("libcuda.so.1"), [wheels.CUDA_12], "in a container: pass the GPUs in"),
        (LACKS.format("libfabric.so.1"), [wheels.CUDA_12], "nothing that pip installs brings libfabric.so.1"),
        ("No module named 'mooncake'", [], "`pip install 'kv-singleflight[cpu]'`"),
        (
            "No module named 'mooncake.store'",
            [wheels.CUDA_12],
            "`pip install --force-reinstall --no-deps mooncake-transfer-engine`",
        ),
    ],
)
def test_a_mooncake_that_does_not_import_is_one_sentence_that_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, says: str, installed: list[str], advice: str
) -> None:
    """Never the advice to install what is installed."""

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mooncake.store":
                raise ImportError(says)

    monkeypatch.setattr(wheels, "installed", lambda: installed)
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(EmbeddedError) as error:
        embedded.check_mooncake_imports()
    assert says in str(error.value)
    assert advice in str(error.value)


def test_the_installed_mooncake_is_found_by_its_distribution() -> None:
    assert len(wheels.installed()) == 1
    assert wheels.installed()[0].startswith(wheels.DISTRIBUTION)


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
