"""Key-value stores of ranks: on one host a file in a folder of the user's alone, on several torch's, on one address."""

from __future__ import annotations

import datetime
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
MEETING_VARIABLE = "MEGASDC_MEETING"
"""Folder in which the ranks of a launch on one host meet; empty or absent: they meet at MASTER_ADDR and MASTER_PORT."""
STORE_FILE = "store"


def check_own_folder(folder: Path) -> None:
    """Refuse a folder that others may write to, or that is a link.

    Raises:
        PermissionError: it is another user's, open to others, or no folder.
        OSError: there is none.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's alone (mode 0700)")


def folder_store(folder: Path) -> dist.Store:
    """The store of the ranks that meet in a folder.

    Raises:
        PermissionError: see ``check_own_folder``.
        OSError: there is none.
    """
    import torch.distributed as dist

    check_own_folder(folder)
    return dist.FileStore(str(folder / STORE_FILE))


def serve_store(address: str, port: int, timeout: datetime.timedelta = datetime.timedelta(minutes=5)) -> dist.TCPStore:
    """A store that listens on one address, where torch's own listens on all.

    Args:
        port: 0: a free one.
        timeout: of the store.

    Raises:
        OSError: the address is none of this host's, or the port is in use.
    """
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, port), family=family, backlog=1024)
    port = int(server.getsockname()[1])
    descriptor = server.detach()  # the store's from now on
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
    )
