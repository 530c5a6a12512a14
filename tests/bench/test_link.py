"""The shaped link: it limits, and nothing of it is left, however the block ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench.ab import link
from bench.ab.link import LinkError, shaped_link


def left() -> list[str]:
    devices = [p.name for p in Path("/sys/class/net").iterdir() if p.name.startswith(("kvsfn", "kvsff"))]
    return devices + [p.name for p in link.NAMESPACES.glob("kvsf-*")]


@pytest.fixture
def needs_a_link() -> None:
    try:
        with shaped_link():
            pass
    except LinkError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("needs_a_link")
def test_both_ends_are_shaped_to_the_rate_and_freed_again() -> None:
    with shaped_link() as made:
        made.shape(0.4)
        for enter, device in ((), made.near_device), (made.enter, made.far_device):
            said = subprocess.run(
                [*enter, "tc", "qdisc", "show", "dev", device], capture_output=True, text=True
            )
            assert "tbf" in said.stdout
            assert "rate 400Mbit" in said.stdout
        made.shape(None)
        said = subprocess.run(
            ["tc", "qdisc", "show", "dev", made.near_device], capture_output=True, text=True
        )
        assert "tbf" not in said.stdout


@pytest.mark.usefixtures("needs_a_link")
def test_nothing_is_left_after_an_interruption() -> None:
    with pytest.raises(KeyboardInterrupt), shaped_link():
        raise KeyboardInterrupt
    assert not [name for name in left() if name.endswith(str(os.getpid()))]


@pytest.mark.usefixtures("needs_a_link")
def test_what_a_killed_run_has_left_is_removed_by_the_next() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    subprocess.run(["ip", "netns", "add", f"kvsf-{ended.pid}"], check=True)
    with shaped_link():
        assert f"kvsf-{ended.pid}" not in left()


def test_without_root_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkError, match="network namespaces need root"), shaped_link():
        pass
