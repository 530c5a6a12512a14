"""Where a group lives: in one event loop, entered and left by one task."""

from __future__ import annotations

import anyio
import anyio.lowlevel


class Home:
    """The event loop and the task in which it is made."""

    def __init__(self) -> None:
        token = anyio.lowlevel.current_token()
        self._loop = token.native_token
        self._current_loop = token.backend_class.current_token  # asks no other library: this is on every path
        # The number stays this task's for as long as the group's task group, which keeps the task, is open.
        self._task = anyio.get_current_task()

    def check_loop(self) -> None:
        """RuntimeError in another event loop than the group's, and in a thread without one."""
        try:
            here = self._current_loop() is self._loop
        except RuntimeError:  # no event loop, or one of another library
            here = False
        if not here:
            raise RuntimeError(
                "a flight group belongs to the event loop that it was entered in, and this is another one or"
                " a thread without one; make a group for each event loop, or call it from a worker thread"
                " with anyio.from_thread.run"
            )

    def left_elsewhere(self) -> str | None:
        """What is wrong if the current task is not the one that entered the group."""
        task = anyio.get_current_task()
        if task == self._task:
            return None
        return (
            f"a flight group is left by the task that entered it; {self._task.name!r} entered this one and"
            f" {task.name!r} leaves it. Its loads are cancelled. How to use a group in fixtures, lifespans"
            ' and containers: docs/aio.md, "Where a group can live"'
        )
