"""Writes a file on one host that its user alone may read; its source is sent there, so it imports no megasdc."""

from __future__ import annotations

import os
import pathlib
from typing import Any


def answer(request: dict[str, Any]) -> None:
    """Write ``text`` to the file ``path``, which is replaced; its folder is made."""
    path = pathlib.Path(request["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(request["text"])
    os.replace(part, path)
