"""Lists a launch's processes on one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
from typing import Any


def answer(request: dict[str, Any]) -> list[int]:
    """Return the ids of the processes whose environment or launcher's command line holds ``launch_id``.

    Zombies are not listed: their environment and command line are empty. With ``run_dir``, resolved, only those that a
    signal has stopped (SIGSTOP) are, agents of that run too: launchers and agents are woken, and those of all that
    ``seen`` has, ids that were listed before, are killed.
    """
    sign = request["launch_id"].encode()
    if "run_dir" in request:
        return _end_stopped(sign, request["run_dir"], request["seen"])
    return [pid for pid in _pids() if _is_rank(pid, sign) or _is_launcher(pid, sign)]


def _end_stopped(sign: bytes, run_dir: str, seen: list[int]) -> list[int]:
    found = []
    folder = json.dumps(run_dir).encode()
    for pid in _pids():
        wakes = _is_launcher(pid, sign) or _holds(pid, "cmdline", b"megasdc.health.agent", folder)
        if (wakes or _is_rank(pid, sign)) and _is_stopped(pid):
            found.append(pid)
            with contextlib.suppress(OSError):
                if pid in seen:
                    os.kill(pid, signal.SIGKILL)
                elif wakes:
                    os.kill(pid, signal.SIGCONT)
    return found


def _pids() -> list[int]:
    return [int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*") if int(path.name) != os.getpid()]


def _is_rank(pid: int, sign: bytes) -> bool:
    return _holds(pid, "environ", b"MEGASDC_LAUNCH_ID=" + sign)


def _is_launcher(pid: int, sign: bytes) -> bool:
    return _holds(pid, "cmdline", b"megasdc.launcher", sign)


def _is_stopped(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _holds(pid: int, name: str, *signs: bytes) -> bool:
    try:
        content = pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return False  # it has ended, or belongs to another user
    return all(sign in content for sign in signs)
