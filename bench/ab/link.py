"""A real slow link: two network namespaces, a veth pair, and `tc tbf` on both of its ends.

The store node lives in a namespace of its own; engines, master and client stay where they are. Everything is
named after this process, removed with the block (also on failure and Ctrl-C), and what a killed run has left
is removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "kvsf"
NAMESPACES = Path("/run/netns")
MTU = 9000
"""Jumbo frames, as storage networks have; also less work for these few cores."""
QUEUE_BYTES = 64 << 20
"""How long the shaper's queue may get before it drops: never. A Get has dozens of connections, and with 50 ms
of queue some of their first segments were lost: a Get of 0.9 s took up to 25 s then."""


class LinkError(RuntimeError):
    """No shaped link can be made here; the message says why."""


@dataclass(frozen=True)
class Link:
    """`near` and `far` are the addresses of the engines' and of the store node's end."""

    namespace: str
    near_device: str
    far_device: str
    near: str
    far: str

    @property
    def enter(self) -> tuple[str, ...]:
        """What starts a command at the far end."""
        return ("ip", "netns", "exec", self.namespace)

    def shape(self, gbit_s: float | None) -> None:
        """Set the rate of both directions, Gbit/s; None: as fast as the kernel goes."""
        for enter, device in ((), self.near_device), (self.enter, self.far_device):
            if gbit_s is None:
                # Fails where there is no shaper, which is what is wanted.
                subprocess.run([*enter, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True)
                continue
            # One millisecond's worth, but never less than two of the kernel's segments of 64 KiB.
            burst = max(128 << 10, int(gbit_s * 1e9 / 8 / 1000))
            _run(
                *enter, "tc", "qdisc", "replace", "dev", device, "root", "tbf",
                "rate", f"{gbit_s * 1000:g}mbit", "burst", str(burst), "limit", str(QUEUE_BYTES),
            )  # fmt: skip


def _run(*argv: str) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True)
    except FileNotFoundError:
        raise LinkError(f"`{argv[0]}` is not installed (Debian: iproute2)") from None
    if done.returncode != 0:
        raise LinkError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.returncode}")


def _remove(namespace: str, device: str) -> None:
    for argv in ["ip", "netns", "del", namespace], ["ip", "link", "del", device]:
        subprocess.run(
            argv, capture_output=True
        )  # either may be gone, and the device goes with the namespace


def _remove_leftovers() -> None:
    for left in NAMESPACES.glob(f"{PREFIX}-*"):
        pid = left.name.removeprefix(f"{PREFIX}-")
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove(left.name, f"{PREFIX}n{pid}")


@contextlib.contextmanager
def shaped_link() -> Iterator[Link]:
    """The link, not yet limited. LinkError: without root, or without `ip` and `tc`."""
    if os.geteuid() != 0:
        raise LinkError("network namespaces need root")
    _remove_leftovers()
    pid = os.getpid()
    # A /30 of 198.18.0.0/15, the range set aside for benchmarks (RFC 2544).
    net = f"198.18.{pid % 251}.{4 * (pid % 61)}".rsplit(".", 1)
    near, far = (f"{net[0]}.{int(net[1]) + i}" for i in (1, 2))
    link = Link(f"{PREFIX}-{pid}", f"{PREFIX}n{pid}", f"{PREFIX}f{pid}", near, far)
    try:
        inside = ("ip", "-n", link.namespace)
        _run("ip", "netns", "add", link.namespace)
        _run(
            "ip", "link", "add", link.near_device, "mtu", str(MTU), "type", "veth",
            "peer", "name", link.far_device, "mtu", str(MTU), "netns", link.namespace,
        )  # fmt: skip
        _run("ip", "addr", "add", f"{near}/30", "dev", link.near_device)
        _run("ip", "link", "set", link.near_device, "up")
        _run(*inside, "addr", "add", f"{far}/30", "dev", link.far_device)
        _run(*inside, "link", "set", link.far_device, "up")
        _run(*inside, "link", "set", "lo", "up")
        link.shape(1.0)
        link.shape(None)
        yield link
    finally:
        _remove(link.namespace, link.near_device)
