"""What the system says of a process: running, stopped, waiting for a disk, or gone; and how one is woken."""

from __future__ import annotations

import contextlib
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

    Args:
        limit_s: seconds that it may stay stopped before it gets SIGCONT, and again before it gets SIGKILL.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stopped: dict[tuple[int, float], tuple[float, bool]] = {}

    def look(self, pid: int) -> str:
        """Look at a process that is not reaped yet; returns what was done, in a sentence; empty: nothing."""
        try:
            process = psutil.Process(pid)
            key = pid, process.create_time()  # another process may have its id later
            is_stopped = process.status() == psutil.STATUS_STOPPED  # not one that a debugger holds
        except psutil.Error:
            return ""
        if not is_stopped:
            self._stopped.pop(key, None)
            return ""
        since, is_woken = self._stopped.setdefault(key, (time.monotonic(), False))
        if time.monotonic() - since < self._limit_s:
            return ""
        self._stopped[key] = time.monotonic(), True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL if is_woken else signal.SIGCONT)
        done = "stays so and is killed" if is_woken else f"has been for {self._limit_s:g} s: it is woken (SIGCONT)"
        return f"process {pid} is stopped by a signal, and {done}"
