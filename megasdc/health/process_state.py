"""What the system says of a process: running, stopped, waiting for a disk, or gone; and how one is woken."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from pathlib import Path

import psutil

from megasdc.health.rank_state import DISK, GONE, RUNNING, STOPPED

TOLERANCE_S = 0.1
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
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Waker:
    """Wakes a process that a signal has stopped (SIGSTOP) while others wait for it, and kills it where it stays so.

    Likewise one that waits for a disk each time that it is looked at, as where its host swaps: it is killed, which the
    kernel does once it waits no more; where even that does not come, it is given up: of its own it does nothing more.

    Args:
        limit_s: seconds that it may stay stopped before it gets SIGCONT, and again before it gets SIGKILL.
        disk_s: seconds that it may wait for a disk before it gets SIGKILL, and again before it is given up.
    """

    def __init__(self, limit_s: float, disk_s: float = math.inf) -> None:
        self._limit_s, self._disk_s = limit_s, disk_s
        self._held: dict[tuple[int, float], tuple[str, float, bool]] = {}
        self.given_up: set[int] = set()
        """Processes that wait for a disk and do not end though they were killed."""

    def look(self, pid: int) -> str:
        """Look at a process that is not reaped yet; returns what was done, in a sentence; empty: nothing."""
        try:
            process = psutil.Process(pid)
            key, status = (pid, process.create_time()), process.status()  # another process may have its id later
        except psutil.Error:
            return ""
        if status not in (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP):  # a debugger may hold it
            self._held.pop(key, None)
            return ""
        before, since, was_told = self._held.get(key, ("", 0.0, False))
        if before != status:
            self._held[key] = status, time.monotonic(), False
            return ""
        is_stopped = status == psutil.STATUS_STOPPED
        if time.monotonic() - since < (self._limit_s if is_stopped else self._disk_s) or pid in self.given_up:
            return ""
        self._held[key] = status, time.monotonic(), True
        if is_stopped:
            _send(pid, signal.SIGKILL if was_told else signal.SIGCONT)
            done = "stays so and is killed" if was_told else f"has been for {self._limit_s:g} s: it is woken (SIGCONT)"
            return f"process {pid} is stopped by a signal, and {done}"
        if was_told:
            self.given_up.add(pid)
            return f"process {pid} waits for a disk, was killed, and does not end: it is given up"
        _send(pid, signal.SIGKILL)
        return f"process {pid} waits for a disk, has for {self._disk_s:g} s, and is killed"


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
