"""Limits that containers and schedulers set on the memory of this process's host: memory cgroups, of both versions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of a cgroup.

    Args:
        limit: bytes.
        used: of them, without files that the kernel would give up.
    """

    limit: float
    used: float


def memory_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[MemoryLimit]:
    """Limits of this process's memory cgroup and of all above it; those that cannot be read are skipped."""
    found = []
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for _, controllers, place in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers not in ("", "memory"):
            continue
        if controllers:
            root, limit, usage, cache = cgroups / "memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"
        else:
            root, limit, usage, cache = cgroups, "max", "current", "inactive_file"
        here = root / place.strip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(root):
                break
            try:
                most = float((folder / f"memory.{limit}").read_text(encoding="utf-8"))
            except (OSError, ValueError):  # "max", or not mounted this way in a container
                continue
            found.append(MemoryLimit(most, _used(folder, usage, cache)))
    return found


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process's host, or container, can still allocate without swapping."""
    return int(min(_available(proc), *(one.limit - one.used for one in memory_limits(proc, cgroups)), float("inf")))


def _available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, number = line.partition(":")
        if name == "MemAvailable":
            return int(number.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _used(folder: Path, usage: str, cache: str) -> float:
    try:
        used = float((folder / f"memory.{usage}").read_text(encoding="utf-8"))
        stat = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        return used - next((float(line.split()[1]) for line in stat if line.split()[0] == cache), 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0
