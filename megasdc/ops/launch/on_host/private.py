"""Leaves what is secret of a launch on one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import stat
import tempfile
import time
from typing import Any

ENVIRONMENT = "environment"
LARGEST_BYTES = 1 << 20
FORGOTTEN_S = 3600.0
"""A launcher of a host takes the variables at its start: where none has in that time, the front was killed before."""
_PREFIX = "megasdc-launch-"


def answer(request: dict[str, Any]) -> str:
    """Write files of a launch where its processes of this user find them, or remove them; returns their folder.

    Args:
        request: ``name`` of ``path_of``, and ``files``, texts by name; None: remove all.

    Raises:
        SystemExit: the folder is there: another host of the launch is this machine.
    """
    folder = path_of(request["name"])
    if request["files"] is None:
        remove_private(request["name"])
        return str(folder)
    _remove_forgotten(folder.parent)
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        raise SystemExit(
            f"{socket.gethostname()} is this machine's name and that of another host of the launch, which shares its "
            "memory: list each machine once, with all its slots"
        ) from None
    for name, text in request["files"].items():
        number = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
    return str(folder)


def path_of(name: str) -> pathlib.Path:
    """The folder, in the memory of this host; hosts may share that.

    Args:
        name: random, so that nobody can make the folder before.
    """
    shared = pathlib.Path("/dev/shm")
    parent = shared if shared.is_dir() else pathlib.Path(tempfile.gettempdir())
    return parent / f"{_PREFIX}{name}-{socket.gethostname()}"


def pop_environment(name: str) -> dict[str, str]:
    """Read the variables and remove their file; empty where there is none that this user alone has written."""
    path = path_of(name) / ENVIRONMENT
    if not _is_own(path.parent):
        return {}
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    with open(number, encoding="utf-8") as file:
        seen = os.fstat(number)
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > LARGEST_BYTES:
            return {}
        path.unlink(missing_ok=True)
        found = json.load(file)
    return {str(name): str(value) for name, value in found.items()}


def remove_private(name: str) -> None:
    """Remove the folder with its files, where it is this user's."""
    _remove(path_of(name))


def _remove_forgotten(parent: pathlib.Path) -> None:
    """Remove folders of this host with variables that nobody will take; a secret alone opens nothing any more."""
    for folder in parent.glob(f"{_PREFIX}*-{socket.gethostname()}"):
        with contextlib.suppress(OSError):
            if (folder / ENVIRONMENT).lstat().st_mtime < time.time() - FORGOTTEN_S:
                _remove(folder)


def _remove(folder: pathlib.Path) -> None:
    if _is_own(folder):
        with contextlib.suppress(OSError):  # the front and the launcher of the host may both do so
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            folder.rmdir()


def _is_own(folder: pathlib.Path) -> bool:
    """Whether it is a folder, no link, that this user alone may enter."""
    try:
        seen = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o077
