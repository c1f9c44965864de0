"""Lets the memory of a run on one host go; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any


def answer(request: dict[str, Any]) -> list[str]:
    """Let nobody wait any more for a restart of ``run``: its agent removes what this host holds of it.

    Returns:
        The folders.
    """
    shared = pathlib.Path("/dev/shm")
    shared = shared if shared.is_dir() else pathlib.Path(tempfile.gettempdir())
    found = []
    for path in shared.glob(f"megasdc-{os.getuid()}-memory-{request['run']}-*/owner"):
        if path.parent.is_symlink() or path.stat().st_uid != os.getuid():
            continue
        owner = {**json.loads(path.read_text()), "linger_s": 0.0}
        part = path.with_name(f".tmp_owner.release.{os.getpid()}")
        part.write_text(json.dumps(owner))
        os.replace(part, path)
        found.append(str(path.parent))
    return found
