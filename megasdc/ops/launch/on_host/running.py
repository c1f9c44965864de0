"""Lists a launch's processes on one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
from typing import Any


def answer(request: dict[str, Any]) -> list[Any]:
    """Return the ids of the processes whose environment or launcher's command line holds ``launch_id``.

    Zombies are not listed: their environment and command line are empty. With ``run_dir``, resolved, only those that a
    signal has stopped (SIGSTOP) are, agents of that run too, and launchers and agents that wait for a disk (a rank that
    does may save), each with its state, T or D: those that ``kill`` has are killed, and launchers and agents that are
    stopped are woken. With ``all``, all are killed.
    """
    sign = request["launch_id"].encode()
    if "run_dir" in request:
        return _end_stopped(sign, request["run_dir"], request["kill"])
    found = [pid for pid in _pids() if _is_rank(pid, sign) or _is_launcher(pid, sign)]
    for pid in found if request.get("all") else []:
        _send(pid, signal.SIGKILL)
    return found


def _end_stopped(sign: bytes, run_dir: str, kill: list[int]) -> list[tuple[int, str]]:
    found = []
    folder = json.dumps(run_dir).encode()
    for pid in _pids():
        if (state := _state(pid)) not in ("T", "D"):
            continue
        wakes = _is_launcher(pid, sign) or _holds(pid, "cmdline", b"megasdc.ops.health.agent", folder)
        if wakes or (state == "T" and _is_rank(pid, sign)):
            found.append((pid, state))
            if pid in kill:
                _send(pid, signal.SIGKILL)
            elif wakes and state == "T":
                _send(pid, signal.SIGCONT)
    return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _pids() -> list[int]:
    found = (int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*"))
    return [pid for pid in found if pid != os.getpid() and _is_own(pid)]


def _is_own(pid: int) -> bool:
    """Whether a process is this user's: others may write what they like on their command lines."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False  # it has ended


def _is_rank(pid: int, sign: bytes) -> bool:
    return _holds(pid, "environ", b"MEGASDC_LAUNCH_ID=" + sign)


def _is_launcher(pid: int, sign: bytes) -> bool:
    return _holds(pid, "cmdline", b"megasdc.ops.launch", sign)


def _state(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _holds(pid: int, name: str, *signs: bytes) -> bool:
    try:
        content = pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return False  # it has ended, or belongs to another user
    return all(sign in content for sign in signs)
