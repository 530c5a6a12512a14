"""Ctrl-C: pressed once it is never lost, pressed again it breaks nothing off, and workers do not see it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from singleflight.terminal.interrupt import interrupts, shielded


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_press_that_a_finaliser_swallows_is_raised_at_the_next_check(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Dying:
        def __del__(self) -> None:
            press()

    with interrupts() as ctrl_c:
        dying = Dying()
        del dying
        with pytest.raises(KeyboardInterrupt):
            ctrl_c.check()
    assert capfd.readouterr().err == ""


def test_a_second_press_does_not_break_off_what_the_first_began() -> None:
    with interrupts() as ctrl_c:
        with pytest.raises(KeyboardInterrupt):
            press()
        press()
        assert ctrl_c.pressed


def test_when_the_results_are_in_place_there_is_nothing_to_interrupt() -> None:
    with interrupts() as ctrl_c:
        ctrl_c.done = True
        press()
    with pytest.raises(KeyboardInterrupt):
        press()  # the usual handler is back


def test_where_the_shell_has_it_ignored_it_stays_ignored() -> None:
    """A background job of a script. Ctrl-C at the script must not end it half way."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts() as ctrl_c, shielded():
            press()
            press()
        assert not ctrl_c.pressed
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_press_in_a_shielded_block_comes_after_it() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), shielded():
        press()
        seen.append("the block went on")
    assert seen == ["the block went on"]


def test_a_press_that_another_thread_takes_comes_after_a_shielded_block_too() -> None:
    """A library's thread does not know of the mask, and Python runs the handler in the main thread."""
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()  # with SIGINT open, as a library starts it
    seen = []
    arrived, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written)
    try:
        with pytest.raises(KeyboardInterrupt), shielded():
            assert other.ident is not None
            signal.pthread_kill(other.ident, signal.SIGINT)
            os.read(arrived, 1)
            seen.append("the block went on")
    finally:
        signal.set_wakeup_fd(before)
        os.close(arrived)
        os.close(written)
        end.set()
        other.join()
    assert seen == ["the block went on"]


def test_a_process_started_in_a_shielded_block_never_sees_it(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('still here')"
    with shielded():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("still here", 0)
