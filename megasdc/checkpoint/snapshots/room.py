"""Whether the hosts' memory has room for snapshots."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import torch.distributed as dist

from megasdc.memory_limits import memory_limits
from megasdc.parallel.collectives import gather_objects
from megasdc.shared_memory import shared_folder

GIB, MIB = 1 << 30, 1 << 20
LEAST_BYTES = 64 << 20
"""State of a rank below which a snapshot saves nothing: writing it takes a fraction of a second."""
_SHARE = 0.8
"""Of the free memory that snapshots may take."""


def free_memory() -> int:
    """Bytes that this process's host, or container, can still allocate without swapping."""
    return int(min(_available(), *(one.limit - one.used for one in memory_limits()), float("inf")))


def _available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, number = line.partition(":")
        if name == "MemAvailable":
            return int(number.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def why_not(size: int, group: dist.ProcessGroup | None, *, is_asked: bool, with_names: bool = False) -> str | None:
    """Why snapshots are not taken, the same on all ranks; None: they are.

    Args:
        size: bytes that this rank's snapshots still need.
        is_asked: also small ones are wanted.
        with_names: they lie in the folder of shared memory, whose size is limited too.

    Collective: the group.
    """
    room = min(free_memory(), shutil.disk_usage(shared_folder()).free) if with_names else free_memory()
    told = gather_objects((socket.gethostname(), size, room), group)
    largest = max(one for _, one, _ in told)
    if largest < LEAST_BYTES and not is_asked:
        return f"the state of a rank has {largest / MIB:,.1f} MiB, which is written faster than it is worth"
    for host in dict.fromkeys(name for name, _, _ in told):
        needed = sum(one for name, one, _ in told if name == host)
        free = min(one for name, _, one in told if name == host)
        if needed > _SHARE * free:
            return (
                f"the snapshots of the ranks on {host} need {needed / MIB:,.1f} MiB of memory, and of the "
                f"{free / MIB:,.1f} MiB that are free {f'in {shared_folder()} ' if with_names else ''}there they may "
                f"take {_SHARE:.0%}: use fewer ranks a host, or more memory"
                f"{f', or a larger {shared_folder()}' if with_names else ''}"
            )
    return None
