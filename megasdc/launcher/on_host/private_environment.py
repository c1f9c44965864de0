"""Leaves secrets for the launcher of one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import stat
import tempfile
from typing import Any

LARGEST_BYTES = 1 << 20


def answer(request: dict[str, Any]) -> str:
    """Write the variables of a launch where ``take`` finds them, or remove them where it has not; returns the path.

    Args:
        request: ``launch_id``, ``text`` (JSON; None: remove).
    """
    path = path_of(request["launch_id"])
    if request["text"] is None:
        path.unlink(missing_ok=True)
        return str(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(request["text"])
    return str(path)


def path_of(launch_id: str) -> pathlib.Path:
    """The file, in the memory of this host; hosts may share the folder."""
    shared = pathlib.Path("/dev/shm")
    folder = shared if shared.is_dir() else pathlib.Path(tempfile.gettempdir())
    return folder / f"megasdc-{os.getuid()}-environment-{launch_id}-{socket.gethostname()}"


def take(launch_id: str) -> dict[str, str]:
    """Read the variables and remove the file; empty where there is none, or none that this user alone has written."""
    path = path_of(launch_id)
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    with open(number, encoding="utf-8") as file:
        seen = os.fstat(number)
        if seen.st_uid != os.getuid() or not stat.S_ISREG(seen.st_mode) or seen.st_size > LARGEST_BYTES:
            return {}
        path.unlink(missing_ok=True)
        found = json.load(file)
    return {str(name): str(value) for name, value in found.items()}
