"""What the system says of a process: running, stopped, waiting for a disk, or gone; and how one is woken."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

RUNNING, STOPPED, DISK, GONE = "running", "stopped", "waiting for a disk", "gone"
TOLERANCE_S = 0.1
DISK_S = 120.0
"""For so long a process that others wait for may wait for a disk, as where its host swaps, or not run."""
PAUSE_S = 10.0
"""Who has not looked for so long was stopped with its host: what others did not do meanwhile does not count."""
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
    """Ends what others wait for and what does not run: from outside, since it cannot end itself.

    A process that a signal has stopped (SIGSTOP) is woken first, and killed where it stays so. One that waits for a
    disk each time that it is looked at, as where its host swaps, is killed, which the kernel does once it waits no
    more; so is one that polls and has not run. Where even that does not end it, it is given up: of its own it does
    nothing more.

    Args:
        limit_s: seconds that it may stay stopped before it gets SIGCONT, and again before it gets SIGKILL.
        disk_s: seconds that it may wait for a disk, or not run, before it gets SIGKILL; again before it is given up.
        polls: a healthy one runs every few seconds, whatever it waits for, so that one that does not is ended.
    """

    def __init__(self, limit_s: float, disk_s: float = DISK_S, *, polls: bool = False) -> None:
        self._limit_s, self._disk_s, self._polls = limit_s, disk_s, polls
        self._held: dict[tuple[int, float], _Held] = {}
        self.given_up: set[int] = set()
        """Processes that do not end though they were killed."""

    def look(self, pid: int) -> str:
        """Look at a process that is not reaped yet; returns what was done, in a sentence; empty: nothing."""
        try:
            process = psutil.Process(pid)
            key, state = (pid, process.create_time()), self._state(process)  # another process may have its id later
        except (psutil.Error, OSError):
            return ""
        before, now = self._held.pop(key, None), time.monotonic()
        if state is None:
            return ""
        if before is None or before.state != state or now - before.looked_at > PAUSE_S:
            before = _Held(state, now, now)
        is_stopped = state == psutil.STATUS_STOPPED
        limit_s = self._limit_s if is_stopped else self._disk_s
        if now - before.since < limit_s or pid in self.given_up:
            self._held[key] = replace(before, looked_at=now)
            return ""
        self._held[key] = _Held(state, now, now, before.told + 1)
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
        """What is to last no longer than a limit: a process state, or how often the process has run; None: nothing."""
        status = process.status()
        if status in _WHAT:
            return status
        if not self._polls or status in (psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE):  # a debugger may hold it
            return None
        return str(_times_run(process.pid))


@dataclass(frozen=True)
class _Held:
    """A process that does not run, since when, when it was last looked at, and how often something was done."""

    state: str
    since: float
    looked_at: float
    told: int = 0


_WHAT = {psutil.STATUS_STOPPED: "is stopped by a signal", psutil.STATUS_DISK_SLEEP: "waits for a disk"}


def _times_run(pid: int) -> int:
    """How often threads of a process have been switched away from.

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
