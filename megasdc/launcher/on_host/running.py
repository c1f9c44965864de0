"""Lists a launch's processes on one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import os
import pathlib
from typing import Any


def answer(request: dict[str, Any]) -> list[int]:
    """Return the ids of the processes whose environment or launcher's command line holds ``launch_id``.

    Zombies are not listed: their environment and command line are empty.
    """
    sign = request["launch_id"].encode()
    return [
        int(folder.name)
        for folder in pathlib.Path("/proc").glob("[0-9]*")
        if int(folder.name) != os.getpid()
        and (
            _holds(folder / "environ", b"MEGASDC_LAUNCH_ID=" + sign)
            or _holds(folder / "cmdline", b"megasdc.launcher", sign)
        )
    ]


def _holds(path: pathlib.Path, *signs: bytes) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False  # it has ended, or belongs to another user
    return all(sign in content for sign in signs)
