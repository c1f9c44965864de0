"""This process's host: files in shared memory, memory and its limits, and states of processes; no torch.

Files in shared memory outlive the process that wrote them, for others of the host. Every user may create files there.
So a file or folder is used only if it belongs to this user, who alone may create and change it: owner and kind are
compared before anything is read, links are not followed, and no file larger than its limit is read. A folder that
nobody else may enter (0700) keeps others from all that is in it.

Limits of memory are those of memory cgroups, of both versions, which containers and schedulers set, and of the host
itself; ``MemoryWatch`` finds the processes that the kernel has killed for lack of memory. Only for files the owner of
shared memory is known: in /dev/shm, files of other users count as others', and so do those from before the launch,
except those of this user's runs. The rest counts as nobody's.

A process is running, stopped, waiting for a disk, or gone; ``Waker`` wakes or ends one that does not run.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import re
import signal
import stat
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megasdc.common.durable import parse_json

SHARED_MEMORY = Path("/dev/shm")
SNAPSHOT_SHARE = 0.8
"""Share of the free memory that snapshots of a state may take."""
NAME_VARIABLE = "MEGASDC_SHARED_NAME"
"""Random part of the names of this host's folders, for ranks that cannot tell each other one.

The front sets it for what it starts, and ``megasdc.ops.launch.node`` for ranks on other hosts. Other users see
arguments of processes, but not this.
"""
MAX_BYTES = 16 << 20
"""Largest size of a file of ours in shared memory that is read."""
_BUFFER_PREFIX = "deepspeed_allreduce_buffer_"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def shared_folder() -> Path:
    """Shared memory where the system has it; else the folder of temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def own_prefix() -> str:
    """Prefix of the names of this user's folders in shared memory."""
    return f"megasdc-{os.getuid()}-"


def deepspeed_buffer(rank: int | str, environ: Mapping[str, str] = os.environ) -> str:
    """Name of the buffer that DeepSpeed makes for a rank on a CPU for its inference layers, and never removes: 66 MB.

    Training does not use it. Source: DeepSpeed 0.19.8, ``csrc/cpu/comm/shm.cpp``.

    Args:
        environ: environment of the rank, with the address and the port of its launch.
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
    """Whether a name is that of such a buffer; the record of an earlier launch may hold anything."""
    return name.startswith(f"{_BUFFER_PREFIX}{os.getuid()}_") and "/" not in name


def make_own_folder(path: Path) -> None:
    """Create a folder that this user alone may enter; an existing one must be such a folder.

    Raises:
        PermissionError: the name is that of another kind of file, of another user's folder, or of one open to others.
        OSError: it cannot be created.
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
    """This user's folders in shared memory whose names begin with ``prefix``; those of others are not opened."""
    with os.scandir(shared_folder()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and is_own_folder(entry):
                yield Path(entry.path)


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user's, no link; returns its descriptor.

    Raises:
        PermissionError: it is no such file.
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
        largest: largest size in bytes.

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


PROC, CGROUPS, KERNEL_LOG = Path("/proc"), Path("/sys/fs/cgroup"), Path("/dev/kmsg")
FIRST_PIDS = "pid:[4026531836]"
"""PID namespace of the process ids in the kernel's log; source: ``PROC_PID_INIT_INO`` of the kernel's proc_ns.h."""
_KILLED = re.compile(rb"(?:ut of memory[^:\n]*:|;) ?Killed process (\d+) \([^\n]*?total-vm:\d+kB, anon-rss:(\d+)kB")
"""Source: ``__oom_kill_process`` of the kernel's mm/oom_kill.c; until 5.0 the sentence had nothing before it."""
WORKER_S = 60.0
"""Seconds within which a rank ends after one of its workers, whose results it needs."""
_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d[\d, ]*)\) (?:is killed by signal: Killed|exited unexpectedly)"
    r"|process pool was terminated abruptly|One of the subprocesses has abruptly died"
)
"""Messages of ranks whose worker was killed; the last of ``concurrent.futures.process`` and Hugging Face's datasets."""
MAX_FILES = 100_000
"""Maximum number of files in memory whose owner is determined."""


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit of a cgroup.

    Args:
        limit: limit in bytes.
        used: bytes in use, without files that the kernel would give up.
    """

    limit: float
    used: float


@dataclass(frozen=True)
class MemoryUse:
    """Memory of programs, without files, on the host or, if its limit is lower, in the container.

    Args:
        total: bytes that programs may have together.
        used: bytes that they have, with others' files in ``/dev/shm`` where no container has a limit.
        shared: bytes of shared memory and files in memory besides.
    """

    total: int
    used: int
    shared: int = 0


@dataclass(frozen=True)
class MemoryKill:
    """Memory figures, in bytes, of a process that the kernel has killed for lack of memory; None: not known.

    Args:
        total: bytes that programs may have together on the host or in the container.
        others: bytes of programs outside the launch right after it, with their files in ``/dev/shm``.
        before: bytes of all programs, likewise, when the launch began there.
        process: bytes of the killed process; None: the kernel's log does not tell.
        shared: bytes of other shared memory and files in memory, whose owner is not known.
    """

    total: int | None
    others: int | None
    before: int | None
    process: int | None = None
    shared: int | None = None


class MemoryWatch:
    """Detects processes of this host that the kernel has killed for lack of memory since this object was created.

    The sign is an entry in the kernel's log with the process. Where the log cannot be read, it is a count of kills in
    this process's memory cgroup that is higher than when all were last seen to run, and than the kills reported here.
    """

    def __init__(
        self, proc: Path = PROC, cgroups: Path = CGROUPS, log: Path = KERNEL_LOG, shared: Path = SHARED_MEMORY
    ) -> None:
        self._proc, self._cgroups, self._log, self._shared = proc, cgroups, log, shared
        self._began = time.time()
        self._count = self._next = self._killed()
        self._counts = deque([(time.monotonic(), self._count)])
        self._before = self._use()
        self._logged = set(self._entries() or {})

    def all_run(self) -> None:
        """Record that all ranks run, so that the kills counted at the last call were not of ranks.

        The kernel counts a process before it has ended.
        """
        self._count, self._next, now = self._next, self._killed(), time.monotonic()
        self._counts.append((now, self._next))
        while len(self._counts) > 2 and self._counts[1][0] <= now - WORKER_S:
            self._counts.popleft()

    def of(self, pid: int, own: Iterable[int]) -> MemoryKill | None:
        """Memory figures for a process that SIGKILL has ended; None: there is no sign that memory was the cause.

        Args:
            own: ids of the launch's processes that live.
        """
        logged = self._entries()
        if logged is not None:
            if pid not in logged or pid in self._logged:
                return None
        else:
            count = self._killed()
            if count is None or self._count is None or count <= self._count:
                return None
            self._count += 1
        return self._kill((logged or {}).get(pid), own)

    def of_worker(self, said: str, own: Iterable[int]) -> MemoryKill | None:
        """Memory figures for a killed worker whose rank has ended since; None: no worker was killed for lack of memory.

        They come from the kernel's log, if it is read and the rank has named the worker; otherwise from the kills that
        the cgroup has counted shortly before.

        Args:
            said: the rank's last message.
            own: as in ``of``.
        """
        if (match := _WORKER.search(said)) is None:
            return None
        workers = [int(pid) for pid in (match["pids"] or "").replace(",", " ").split()]
        logged = self._entries()
        if logged is not None and workers:
            killed = [pid for pid in workers if pid in logged and pid not in self._logged]
            return self._kill(logged[killed[0]], own) if killed else None
        count, before = self._killed(), self._counts[0][1]
        return self._kill(None, own) if count is not None and before is not None and count > before else None

    def _kill(self, process: int | None, own: Iterable[int]) -> MemoryKill:
        now = self._use()
        if now is None or self._before is None:
            return MemoryKill(None, None, None, process)
        others = max(0, now.used - sum(_anonymous_of(self._proc, one) for one in own))
        return MemoryKill(now.total, others, self._before.used, process, now.shared or None)

    def _use(self) -> MemoryUse | None:
        with suppress(OSError, ValueError, KeyError):
            return memory_use(self._proc, self._cgroups, self._shared, self._began)
        return None

    def _killed(self) -> int | None:
        """Number of processes killed so in this one's memory cgroup and those below; None: it does not count them."""
        for folder, is_second in _folders(self._proc, self._cgroups):
            path = folder / ("memory.events" if is_second else "memory.oom_control")
            with suppress(OSError, ValueError):
                for line in path.read_text(encoding="utf-8").splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return None

    def _entries(self) -> dict[int, int] | None:
        """Bytes by process of each entry of the kernel's log; None: its process ids are others, or it is not read."""
        try:
            if os.readlink(self._proc / "self" / "ns" / "pid") != FIRST_PIDS:
                return None
            number = os.open(self._log, os.O_RDONLY | os.O_NONBLOCK)
            try:
                return dict(_entries(number))
            finally:
                os.close(number)
        except OSError:
            return None


def _entries(number: int) -> Iterator[tuple[int, int]]:
    """Source: Documentation/ABI/testing/dev-kmsg of the kernel: a read gives one entry; EPIPE: one was overwritten."""
    while True:
        try:
            text = os.read(number, 1 << 14)
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue
        if not text:
            return
        yield from ((int(match[1]), int(match[2]) * 1024) for match in _KILLED.finditer(text))


def memory_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[MemoryLimit]:
    """Limits of this process's memory cgroup and of all above it; those that cannot be read are skipped."""
    found = []
    for folder, is_second in _folders(proc, cgroups):
        limit, usage, cache = (
            ("max", "current", "inactive_file")
            if is_second
            else ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        )
        try:
            most = float((folder / f"memory.{limit}").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # "max", or not mounted this way in a container
            continue
        found.append(MemoryLimit(most, _used(folder, usage, cache)))
    return found


def memory_use(
    proc: Path = PROC, cgroups: Path = CGROUPS, shared: Path = SHARED_MEMORY, began: float = math.inf
) -> MemoryUse:
    """Memory use of the host, or of the memory cgroup above this process with the lowest limit.

    Args:
        began: start of the launch, seconds since the epoch; files that this user has written to ``shared`` since then
            are the launch's own.
    """
    host = _meminfo(proc)
    total, in_memory = host["MemTotal"] - host.get("Hugetlb", 0), host.get("Shmem", 0)
    files = min(in_memory, _others_files(shared, began))
    best = MemoryUse(total, host.get("AnonPages", 0) + files, in_memory - files)
    for folder, is_second in _folders(proc, cgroups):
        with suppress(OSError, ValueError):
            limit = folder / f"memory.{'max' if is_second else 'limit_in_bytes'}"
            if (most := int(limit.read_text(encoding="utf-8"))) < best.total:
                names = ("anon", "shmem") if is_second else ("total_rss", "total_shmem")
                best = MemoryUse(most, *(_stat(folder, name) for name in names))
    return best


def _others_files(folder: Path, began: float) -> int:
    """Number of bytes that files of others take in a folder in memory; unreadable ones count as 0."""
    seen = itertools.islice(_files(folder), MAX_FILES)
    return sum(status.st_blocks * 512 for top, status in seen if _is_others(top, status, began))


def _is_others(top: str, seen: os.stat_result, began: float) -> bool:
    is_own = seen.st_mtime >= began or top.startswith(own_prefix())
    return stat.S_ISREG(seen.st_mode) and (seen.st_uid != os.getuid() or not is_own)


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All files below a folder, each with the name in that folder under which it lies."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with suppress(OSError):
                yield os.path.relpath(path, folder).split(os.sep)[0], os.lstat(path)


def _folders(proc: Path, cgroups: Path) -> Iterator[tuple[Path, bool]]:
    """Memory cgroups of this process and of all above it, and whether they are of the second version."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return
    for _, controllers, place in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers not in ("", "memory"):
            continue
        root = cgroups / "memory" if controllers else cgroups
        here = root / place.strip("/")
        yield from ((folder, not controllers) for folder in (here, *here.parents) if folder.is_relative_to(root))


def _anonymous_of(proc: Path, pid: int) -> int:
    """Memory of a process without files, bytes; 0: it has ended.

    Source: proc_pid_status(5), ``RssAnon``.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process's host, or container, can still allocate without swapping."""
    return int(min(_available(proc), *(one.limit - one.used for one in memory_limits(proc, cgroups)), float("inf")))


def _available(proc: Path) -> int:
    found = _meminfo(proc)
    if "MemAvailable" not in found:
        raise OSError("/proc/meminfo has no MemAvailable")
    return found["MemAvailable"]


def _meminfo(proc: Path) -> dict[str, int]:
    """Bytes by name; Source: proc_meminfo(5)."""
    lines = (line.partition(":") for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in lines if rest.endswith(" kB")}


def _stat(folder: Path, name: str) -> int:
    """A number of a memory cgroup; 0: it has none of this name."""
    lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _used(folder: Path, usage: str, cache: str) -> float:
    try:
        used = float((folder / f"memory.{usage}").read_text(encoding="utf-8"))
        return used - _stat(folder, cache)
    except (OSError, ValueError, IndexError):
        return 0.0


RUNNING, STOPPED, DISK, GONE = "running", "stopped", "waiting for a disk", "gone"
TOLERANCE_S = 0.1
DISK_S = 120.0
"""Seconds for which a process that others wait for may wait for a disk, such as on a host that swaps, or not run."""
PAUSE_S = 10.0
"""Seconds between two checks above which the observer itself was stopped with its host; its timers start anew."""
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def process_state(pid: int, began_at: float) -> str:
    """State of the process that had this id and this start, seconds since boot; another one with its id is gone."""
    try:
        process = psutil.Process(pid)
        status = process.status()
        if status == psutil.STATUS_ZOMBIE or abs(started_at(pid) - began_at) > TOLERANCE_S:
            return GONE
    except (psutil.Error, OSError, ValueError, IndexError):
        return GONE
    if status in _STOPPED:
        return STOPPED
    return DISK if status == psutil.STATUS_DISK_SLEEP else RUNNING


def started_at(pid: int) -> float:
    """Start of a process on ``CLOCK_BOOTTIME``, seconds, to 10 ms.

    Source: proc_pid_stat(5), field 22; the name in field 2 may hold blanks, so fields are counted from its bracket.
    """
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Waker:
    """Ends processes that do not run while others wait for them, from outside, since they cannot end themselves.

    A process that a signal has stopped (SIGSTOP) is woken first, and killed if it stays stopped. One that waits for a
    disk at each check, such as on a host that swaps, is killed, which the kernel does once the wait is over; so is one
    that should poll and has not run. If even that does not end it, it is given up.

    Args:
        limit_s: seconds that it may stay stopped before it gets SIGCONT, and again before it gets SIGKILL.
        disk_s: seconds that it may wait for a disk, or not run, before it gets SIGKILL; again before it is given up.
        polls: whether a healthy process runs every few seconds, whatever it waits for; one that does not is ended.
    """

    def __init__(self, limit_s: float, disk_s: float = DISK_S, *, polls: bool = False) -> None:
        self._limit_s, self._disk_s, self._polls = limit_s, disk_s, polls
        self._stopped: dict[tuple[int, float], _StoppedState] = {}
        self.given_up: set[int] = set()
        """Ids of processes that were killed and did not end."""

    def check(self, pid: int) -> str:
        """Check a process that is not reaped yet; returns a sentence on the action taken; empty: none."""
        try:
            process = psutil.Process(pid)
            key, state = (pid, process.create_time()), self._state(process)  # another process may have its id later
        except (psutil.Error, OSError):
            return ""
        before, now = self._stopped.pop(key, None), time.monotonic()
        if state is None:
            return ""
        if before is None or before.state != state or now - before.looked_at > PAUSE_S:
            before = _StoppedState(state, now, now)
        is_stopped = state == psutil.STATUS_STOPPED
        limit_s = self._limit_s if is_stopped else self._disk_s
        if now - before.since < limit_s or pid in self.given_up:
            self._stopped[key] = replace(before, looked_at=now)
            return ""
        self._stopped[key] = _StoppedState(state, now, now, before.told + 1)
        what = _WHAT.get(state, "does not run")
        if is_stopped and not before.told:
            _send(pid, signal.SIGCONT)
            return f"process {pid} {what}, and has been for {limit_s:g} s: it is woken (SIGCONT)"
        if before.told == is_stopped:
            _send(pid, signal.SIGKILL)
            return f"process {pid} {what}, and {'stays so' if is_stopped else f'has for {limit_s:g} s'}: it is killed"
        self.given_up.add(pid)
        return f"process {pid} {what}, was killed, and does not end: it is given up"

    def _state(self, process: psutil.Process) -> str | None:
        """Condition that may last no longer than a limit: a process state, or a count of switches; None: it is fine."""
        status = process.status()
        if status in _WHAT:
            return status
        if not self._polls or status in (psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE):  # a debugger may hold it
            return None
        return str(_times_run(process.pid))


@dataclass(frozen=True)
class _StoppedState:
    """A process that does not run: its state, since when, time of the last check, and number of actions taken."""

    state: str
    since: float
    looked_at: float
    told: int = 0


_WHAT = {psutil.STATUS_STOPPED: "is stopped by a signal", psutil.STATUS_DISK_SLEEP: "waits for a disk"}


def _times_run(pid: int) -> int:
    """Number of context switches of a process's threads.

    Source: proc_pid_status(5), ``voluntary_ctxt_switches`` and ``nonvoluntary_ctxt_switches``.
    """
    lines = [
        line
        for path in Path(f"/proc/{pid}/task").glob("*/status")
        for line in path.read_text(errors="replace").splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
