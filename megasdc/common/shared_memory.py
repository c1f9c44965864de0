"""Files in memory that outlive the process that wrote them, for others of its host: whose they are; no torch.

Every user may make names in shared memory. So what is there counts only where it belongs to this user, whom the system
lets make and change it alone: owner and kind are compared before anything is read, links are not followed, and no file
is read that is larger than it can be. A folder that nobody else may enter (0700) keeps others from all that is in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json

SHARED_MEMORY = Path("/dev/shm")
SNAPSHOT_SHARE = 0.8
"""Of the free memory that snapshots of a state may take."""
NAME_VARIABLE = "MEGASDC_SHARED_NAME"
"""Random part of the names of this host's folders, for ranks that cannot tell each other one.

The front sets it for what it starts, and ``megasdc.ops.launch.node`` for ranks on other hosts. Other users see
arguments of processes, but not this.
"""
MAX_BYTES = 16 << 20
"""Of a file of ours there that is read at once."""
_BUFFER_PREFIX = "deepspeed_allreduce_buffer_"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def shared_folder() -> Path:
    """Shared memory where the system has it; else the folder of temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def own_prefix() -> str:
    """How names of this user's folders there begin."""
    return f"megasdc-{os.getuid()}-"


def deepspeed_buffer(rank: int | str, environ: Mapping[str, str] = os.environ) -> str:
    """Name of the buffer that DeepSpeed makes for a rank on a CPU for its inference layers, and never removes: 66 MB.

    Who trains has no use for it. Source: DeepSpeed 0.19.8, ``csrc/cpu/comm/shm.cpp``.

    Args:
        environ: of the rank, with the address and the port of its launch.
    """
    return f"{_BUFFER_PREFIX}{os.getuid()}_{environ.get('MASTER_ADDR', '')}_{environ.get('MASTER_PORT', '')}_{rank}"


def remove_buffers(names: Iterable[str]) -> None:
    """Remove buffers of DeepSpeed's, where they are files of this user's; ranks that have opened one keep it."""
    for name in names:
        path = SHARED_MEMORY / name
        with contextlib.suppress(OSError):
            seen = path.stat(follow_symlinks=False)
            if _is_buffer(name) and stat.S_ISREG(seen.st_mode) and seen.st_uid == os.getuid():
                path.unlink()


def _is_buffer(name: str) -> bool:
    """Whether it is the name of one, as a record of an earlier launch should hold it."""
    return name.startswith(f"{_BUFFER_PREFIX}{os.getuid()}_") and "/" not in name


def make_own_folder(path: Path) -> None:
    """Make a folder that this user alone may enter; one that is there already must be such.

    Raises:
        PermissionError: what has this name is no folder, another user's, or open to others.
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=stat.S_IRWXU)
    except FileExistsError:
        if not is_own_folder(path):
            text = "it is no folder that this user alone may enter; another user may have made it: ask for its removal"
            raise PermissionError(errno.EPERM, text, str(path)) from None


def is_own_folder(path: Path | os.DirEntry[str]) -> bool:
    """Whether a name is that of a folder, no link to one, which belongs to this user and no other may enter."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _OTHERS


def own_folders(prefix: str) -> Iterator[Path]:
    """This user's folders in shared memory whose names begin so; of others no more than the owner is looked at."""
    with os.scandir(shared_folder()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and is_own_folder(entry):
                yield Path(entry.path)


def open_own(path: Path, flags: int) -> int:
    """Open a file of this user's, and no link; returns its descriptor.

    Raises:
        PermissionError: it is none.
        OSError: it cannot be opened.
    """
    found = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its other end
    seen = os.fstat(found)
    if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.getuid():
        os.close(found)
        raise PermissionError(errno.EPERM, "it is no file of this user's", str(path))
    return found


def read_own_json(path: Path, largest: int = MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file of this user's.

    Args:
        largest: bytes that it may have.

    Raises:
        ValueError: it is larger, or holds no JSON object.
        OSError: it cannot be read, or is not this user's.
    """
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path} has more than {largest:,} bytes")
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found
