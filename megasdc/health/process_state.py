"""What the system says of a process: running, stopped, waiting for a disk, or gone."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from megasdc.health.rank_state import DISK, GONE, RUNNING, STOPPED

TOLERANCE_S = 0.1


def process_state(pid: int, began_at: float) -> str:
    """State of the process that had this id and this start, seconds since boot; another one with its id is gone."""
    try:
        process = psutil.Process(pid)
        status = process.status()
        if status == psutil.STATUS_ZOMBIE or abs(started_at(pid) - began_at) > TOLERANCE_S:
            return GONE
    except (psutil.Error, OSError, ValueError, IndexError):
        return GONE
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED
    return DISK if status == psutil.STATUS_DISK_SLEEP else RUNNING


def started_at(pid: int) -> float:
    """Start of a process on ``CLOCK_BOOTTIME``, seconds, to 10 ms.

    Source: proc_pid_stat(5), field 22; the name in field 2 may hold blanks, so fields are counted from its bracket.
    """
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
