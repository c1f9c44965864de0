"""Whether the hosts' memory has room for snapshots."""

from __future__ import annotations

import shutil
import socket

import torch.distributed as dist

from megasdc.common.host import SNAPSHOT_SHARE, free_memory, shared_folder
from megasdc.parallel.collectives import gather_objects

GIB, MIB = 1 << 30, 1 << 20
LEAST_BYTES = 64 << 20
"""State of a rank below which a snapshot saves nothing: writing it takes a fraction of a second."""


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
        if needed > SNAPSHOT_SHARE * free:
            return (
                f"the snapshots of the ranks on {host} need {needed / MIB:,.1f} MiB of memory, and of the "
                f"{free / MIB:,.1f} MiB that are free {f'in {shared_folder()} ' if with_names else ''}there they may "
                f"take {SNAPSHOT_SHARE:.0%}: use fewer ranks a host, or more memory"
                f"{f', or a larger {shared_folder()}' if with_names else ''}"
            )
    return None
