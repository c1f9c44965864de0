"""DeepSpeed's buffers in shared memory, 66 MB a rank: none outlives its run.

Where all ranks are on one host without an accelerator, DeepSpeed 0.19.8 (``csrc/cpu/comm/shm.cpp``) makes
``deepspeed_allreduce_buffer_UID_ADDRESS_PORT_RANK`` in /dev/shm and never removes it. Once every rank has mapped every
buffer the names are not needed. A rank that is killed before that leaves them; the next start of this user removes
those that no process uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "deepspeed_allreduce_buffer"
CLEANING_S = 0.5
"""How long a start waits for another one that is cleaning, and one that cleans for others that start."""


@contextmanager
def shared_buffers() -> Iterator[None]:
    """Around ``init_distributed``: removes what killed runs have left before it, and this run's names after it.

    While it lasts no other start removes buffers: one that DeepSpeed takes up again would be lost to its peers, which
    wait for it without end.

    Collective: all ranks of the world.
    """
    if not SHARED_MEMORY.is_dir():
        yield
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        remove_unused()
    with _hold(fcntl.LOCK_SH):
        yield
        names = _own_names()
        if names:
            dist.barrier()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (SHARED_MEMORY / name).unlink()


def remove_unused(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's buffers that no process has open or mapped.

    Args:
        folder: where they lie.

    Returns:
        What was removed.
    """
    found = {path: path.stat() for path in folder.glob(f"{PREFIX}_{os.getuid()}_*")}
    unused = {path for path, status in found.items() if status.st_uid == os.getuid()}
    if not unused:
        return []
    with _hold(fcntl.LOCK_EX, folder) as alone:
        in_use, unreadable = _used_files()
        unused -= in_use
        if unused and (unreadable or not alone):
            why = f"process {unreadable[0]} cannot be looked at" if unreadable else "other runs are starting"
            logger.info("%d unused buffers of DeepSpeed stay in %s for now: %s", len(unused), folder, why)
            return []
        removed = []
        for path in sorted(unused):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime_ns == found[path].st_mtime_ns:  # nobody has written to it since
                    path.unlink()
                    removed.append(path)
    if removed:
        freed = sum(found[path].st_size for path in removed)
        logger.info("removed %d unused buffers of DeepSpeed from %s: %.0f MB", len(removed), folder, freed / 1e6)
    return removed


def _own_names() -> list[str]:
    """Names of this world's buffers, as DeepSpeed makes them; none where it makes none."""
    size = dist.get_world_size()
    if os.environ.get("LOCAL_SIZE") != str(size):
        return []
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return [f"{PREFIX}_{os.getuid()}_{address}_{port}_{rank}" for rank in range(size)]


def _used_files() -> tuple[set[Path], list[str]]:
    """Buffers that this user's processes have open or mapped, and the ranks there may be that do not let us look."""
    used: set[Path] = set()
    unreadable = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid != os.getuid():
                continue
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
            lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            unreadable += [process.name] if _may_be_python(process) else []
            continue
        used.update(Path(link) for link in links if PREFIX in link)
        used.update(Path(line.split(maxsplit=5)[5]) for line in lines if PREFIX in line)
    return used, unreadable


def _may_be_python(process: Path) -> bool:
    """Whether a process whose files are hidden, as those of an SSH agent, could be a rank."""
    try:
        return b"python" in (process / "cmdline").read_bytes()
    except OSError:
        return process.is_dir()


@contextmanager
def _hold(kind: int, folder: Path = SHARED_MEMORY) -> Iterator[bool]:
    """Lock the folder, shared by those that make buffers; yields whether that came about in time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor, kind)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    end = time.monotonic() + CLEANING_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        else:
            return True
