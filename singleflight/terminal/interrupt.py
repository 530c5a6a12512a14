"""Ctrl-C in a process that has workers and libraries around it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Whether Ctrl-C was pressed, even where the exception it raises got lost.

    A KeyboardInterrupt that hits a finaliser is printed and dropped by Python, so the press is remembered
    too, and `check` raises for it at the next good moment. A second press never breaks off the cleaning up.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.done = False  # the results are in place: nothing is left to interrupt

    def on_signal(self, _number: int, _frame: object) -> None:
        first, self.pressed = not self.pressed, True
        if first and not self.done:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.pressed:
            raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Watch for Ctrl-C while the block runs.

    Nothing is changed where nothing can (outside the main thread), or should: a shell starts the background
    jobs of a script with SIGINT ignored, so that Ctrl-C ends the script and not them.
    """
    state = Interrupts()
    if not _concerned():
        yield state
        return
    hook = sys.unraisablehook

    def quiet(lost: Any) -> None:
        # After a press, finalisers of what is being torn down have nothing to say that anybody can act on.
        if not state.pressed:
            hook(lost)

    before = signal.signal(signal.SIGINT, state.on_signal)
    sys.unraisablehook = quiet
    try:
        yield state
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, before)


@contextmanager
def shielded() -> Iterator[None]:
    """Processes and threads started in the block never see Ctrl-C; a press meanwhile is delivered after it.

    The terminal sends it to the whole process group. A worker has nothing to do with it but print a
    traceback, from wherever it is; whoever started the worker ends it.
    """
    if not _concerned():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    missed: list[int] = []
    # The mask is what children inherit. It is this thread's only: a library's thread may take the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, lambda number, _frame: missed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if missed and callable(handler):
            handler(missed[0], None)


def _concerned() -> bool:
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
