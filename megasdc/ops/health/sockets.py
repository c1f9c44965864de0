"""TCP connections of a process as the kernel sees them: to whom it sends what is never acknowledged.

Source: proc_pid_net(5) and Documentation/networking/proc_net_tcp.rst of Linux: the columns of ``/proc/PID/net/tcp``.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ESTABLISHED, RETRANSMIT_TIMER = 0x01, 0x01
LEAST_RETRANSMITS = 3
"""Unanswered repetitions in a row, about 1.5 s at the least, after which a peer counts as silent."""


@dataclass(frozen=True)
class Connection:
    """An established TCP connection.

    Args:
        local: address of this host.
        remote: address of the other one.
        retransmits: how often its oldest data were sent again without an answer; 0: nothing is overdue. A peer that
            takes no more data, since its program does not read, still answers.
    """

    local: str
    remote: str
    retransmits: int


def connections(pid: int) -> list[Connection]:
    """Established connections of a process to other hosts; empty where the process has gone or may not be looked at."""
    found: list[Connection] = []
    try:
        own = set(_inodes(Path(f"/proc/{pid}/fd")))
    except OSError:
        return []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # a kernel without IPv6 has no tcp6
            lines = Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]
            found += [one for line in lines if (one := _parse(line.split(), own)) is not None]
    return found


def silent_peers(found: list[Connection]) -> dict[str, int]:
    """Addresses that acknowledge nothing any more, with the largest number of repetitions."""
    peers: dict[str, int] = {}
    for one in found:
        if one.retransmits >= LEAST_RETRANSMITS:
            peers[one.remote] = max(one.retransmits, peers.get(one.remote, 0))
    return peers


def _inodes(folder: Path) -> Iterator[str]:
    for entry in os.listdir(folder):
        try:
            target = os.readlink(folder / entry)
        except OSError:
            continue  # it has just been closed
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _parse(fields: list[str], own: set[str]) -> Connection | None:
    local, remote, state, timer, retransmits, inode = *fields[1:4], fields[5], fields[6], fields[9]
    addresses = _address(local), _address(remote)
    if int(state, 16) != ESTABLISHED or inode not in own or addresses[1].is_loopback or addresses[0] == addresses[1]:
        return None
    overdue = int(timer.partition(":")[0], 16) == RETRANSMIT_TIMER
    return Connection(str(addresses[0]), str(addresses[1]), int(retransmits, 16) if overdue else 0)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: words of four bytes, each in the byte order of the host."""
    digits = text.partition(":")[0]
    words = [int(digits[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address
