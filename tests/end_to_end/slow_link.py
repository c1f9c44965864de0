"""Slow links between test hosts: real frames from one host to another are held back, dropped or paced in user space.

``tc netem`` does this in the kernel, which may be built without it. Here the switch hands the frames of one direction
to a TAP device (``tc`` with u32 and mirred), and a process gives them back to the switch when they are due. Frames of
other pairs, and of the other direction, never leave the kernel.

That process is ``python slow_link.py DEVICE DELAY_S LOSS BYTES_PER_S`` in the switch's network; a rate of 0: no limit.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster import Cluster

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 2048
BURST = 64
"""Frames that are read before those that are due are given back."""


@contextmanager
def slow_link(
    cluster: Cluster, source: str, target: str, delay_s: float = 0.0, loss: float = 0.0, bytes_per_s: float = 0.0
) -> Iterator[None]:
    """Inside, frames from one host to another are late, lost or slow; those of the other direction are not.

    Args:
        cluster: that the hosts are of.
        source: the host that sends.
        target: the host that receives.
        delay_s: of each frame.
        loss: share of frames that are dropped.
        bytes_per_s: rate; 0: not limited.
    """
    number, of = (cluster.names.index(name) + 1 for name in (source, target))
    port, tap, prio = f"p{number}", f"t{number}{of}", str(10 * number + of)
    numbers = [str(one) for one in (delay_s, loss, bytes_per_s)]
    relay = subprocess.Popen(
        # Dies with the Python process that started it, also when that is killed.
        ["setpriv", "--pdeathsig", "KILL", *cluster.in_switch(sys.executable, __file__, tap, *numbers)],
        stdout=subprocess.PIPE,
    )
    try:
        assert relay.stdout is not None and relay.stdout.readline() == b"ready\n", "no TAP device"
        _switch(cluster, "ip", "link", "set", tap, "master", "br0", "up")
        # It returns frames of a host on another port: the switch must not learn that this host lies behind it, nor hand
        # it anything but those frames, or two such devices would hand each other broadcasts for ever.
        off = [word for what in ("learning", "flood", "mcast_flood", "bcast_flood") for word in (what, "off")]
        _switch(cluster, "bridge", "link", "set", "dev", tap, *off)
        _switch(cluster, "tc", "qdisc", "replace", "dev", port, "clsact")
        mac = cluster.mac(target).replace(":", "")
        match = [*_match("u16", mac[:4], -14), *_match("u32", mac[4:], -12)]
        _switch(
            cluster,
            *("tc", "filter", "add", "dev", port, "ingress", "protocol", "all", "prio", prio),
            *("u32", *match, "action", "mirred", "egress", "redirect", "dev", tap),
        )
        yield
        _switch(cluster, "tc", "filter", "del", "dev", port, "ingress", "prio", prio)
    finally:
        relay.kill()
        relay.communicate()


def limit_rate(cluster: Cluster, mbit_per_s: int) -> None:
    """Limit what the switch gives to each host, in its network card's stead."""
    for number in range(1, len(cluster.names) + 1):
        queue = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kb", "limit", "8mb"]
        _switch(cluster, "tc", "qdisc", "replace", "dev", f"p{number}", "root", *queue)


def _match(kind: str, digits: str, at: int) -> list[str]:
    return ["match", kind, f"0x{digits}", f"0x{'f' * len(digits)}", "at", str(at)]


def _switch(cluster: Cluster, *argv: str) -> None:
    done = subprocess.run(cluster.in_switch(*argv), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv} gave {done.returncode}: {done.stderr}"


def open_tap(name: str) -> int:
    """Create a TAP device that lives as long as this process."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def forward(device: int, delay_s: float, loss: float, bytes_per_s: float) -> None:
    """Give frames back when they are due, in their order."""
    waiting: deque[tuple[float, bytes]] = deque()
    draw, free_at = random.Random(1), 0.0
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        select.select([device], [], [], wait_s)
        now = time.monotonic()
        for frame in _frames(device):
            if draw.random() >= loss:
                free_at = max(free_at, now) + (len(frame) / bytes_per_s if bytes_per_s else 0.0)
                waiting.append((free_at + delay_s, frame))
        while waiting and waiting[0][0] <= now:
            os.write(device, waiting.popleft()[1])


def _frames(device: int) -> Iterator[bytes]:
    for _ in range(BURST):
        try:
            yield os.read(device, FRAME_BYTES)
        except BlockingIOError:
            return


if __name__ == "__main__":
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a link waits for no busy processor
    tap = open_tap(sys.argv[1])
    print("ready", flush=True)
    forward(tap, *(float(one) for one in sys.argv[2:5]))
