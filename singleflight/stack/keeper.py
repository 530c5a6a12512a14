"""Ends a process tree as soon as its first process ends, or the process that started it does.

The kernel's PR_SET_PDEATHSIG reaches direct children only: a server that is killed outright leaves vLLM's
EngineCore and workers behind. So `embedded.spawned` starts each tree in a session of its own and one of these
beside it, which waits for two pidfds and then kills whoever is left in the session.

Run as a file, with nothing but the standard library, so that it is there in a few hundredths of a second:
`python -I -S keeper.py OWNER_PIDFD LEADER_PIDFD SESSION`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LINGER_S = 3.0
"""What a tree whose first process has ended gets to end by itself: Python's resource tracker then removes the
shared memory and the semaphores that a killed process has left behind."""
KILL_S = 10.0
"""How long killed processes may take to be gone; one in an uninterruptible system call takes longer."""


def members(session: int) -> list[int]:
    """The live processes of a session. Zombies do not count: they hold nothing."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(sid) == session and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def kill_session(session: int, limit_s: float = KILL_S) -> bool:
    """SIGKILL until nobody is left; False if somebody still is after `limit_s`.

    Only for a session whose first process has ended, or is this process' own child: its number is not given
    to another process as long as a member lives.
    """
    limit = time.monotonic() + limit_s
    while left := members(session):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def start(session: int) -> subprocess.Popen[bytes] | None:
    """Have a keeper for the tree below this process' child `session`. None where the kernel has no pidfds
    (before 5.3)."""
    try:
        with _pidfd(os.getpid()) as owner, _pidfd(session) as leader:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(owner), str(leader), str(session)],
                pass_fds=(owner, leader),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # a Ctrl-C, or a kill of the owner's group, is not meant for it
            )
    except OSError:
        return None


def _ended(fds: list[int], timeout_s: float | None = None) -> set[int]:
    return set(select.select(fds, [], [], timeout_s)[0])


def main() -> int:
    owner, leader, session = map(int, sys.argv[1:])
    if owner not in _ended([owner, leader]):
        limit = time.monotonic() + LINGER_S
        while members(session) and time.monotonic() < limit and not _ended([owner], 0.05):
            pass
    if _ended([leader], 0) and session in members(session):
        return 0  # everybody has ended, and the number is another session's by now
    return 0 if kill_session(session) else 1


if __name__ == "__main__":
    sys.exit(main())
