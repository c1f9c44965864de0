"""Cold and slow disks: files that are not in the page cache, and a limit of the system on what processes read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megasdc.common.errors import ConfigError

_V1 = Path("/sys/fs/cgroup/blkio")
_V2 = Path("/sys/fs/cgroup")


def drop_from_cache(files: Iterable[Path]) -> None:
    """Let the page cache forget files, once they are on the disk."""
    for file in files:
        opened = os.open(file, os.O_RDONLY)
        try:
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(opened)


@contextmanager
def slowed_disk(folder: Path, bytes_per_s: float) -> Iterator[None]:
    """Context in which this process and those that it starts read no faster from the disk of a folder.

    It is a control group of its own: ``blkio`` of the first version, or ``io`` of the second.

    Raises:
        ConfigError: this user or this system cannot limit that disk.
    """
    device = _disk_of(folder)
    group: Path | None = None
    try:
        top, name, limit = _V1, "blkio.throttle.read_bps_device", f"{device} {bytes_per_s:.0f}"
        if not (top / name).exists():
            top, name, limit = _V2, "io.max", f"{device} rbps={bytes_per_s:.0f}"
        before = top / _group_of("blkio" if top == _V1 else "")
        group = top / f"megasdc_bench_{os.getpid()}"
        group.mkdir()
        (group / name).write_text(limit, encoding="ascii")
        _move(group)
    except OSError as error:
        if group is not None and group.exists():
            group.rmdir()
        raise ConfigError(f"reading from {folder} cannot be slowed down here: {error}") from error
    try:
        yield
    finally:
        _move(before)
        for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
            (before / "cgroup.procs").write_text(pid, encoding="ascii")
        group.rmdir()


def _move(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def _group_of(controller: str) -> str:
    """The control group that this process is in, relative to the hierarchy of a controller; "": the second version."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path.strip("/")
    raise OSError(f"/proc/self/cgroup has no group of {controller or 'version 2'}")


def _disk_of(folder: Path) -> str:
    """Major and minor number of the whole disk that holds a folder."""
    number = os.stat(folder).st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not node.exists():
        raise ConfigError(f"reading from {folder} cannot be slowed down: it lies on no disk")
    disk = node.resolve().parent if (node / "partition").exists() else node
    return (disk / "dev").read_text(encoding="ascii").strip()
