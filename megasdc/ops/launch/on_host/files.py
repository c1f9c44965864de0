"""Reads and writes small files on one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import os
import pathlib
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return the content of every ``*_*.json`` in ``folder`` by name, empty where it cannot be read.

    Of a folder that does not exist nothing.

    With ``text`` instead, replace the file ``path``, which its user alone may read; its folder is made. Without a text
    in it, remove the file.
    """
    if request.get("text", "") is None:
        pathlib.Path(request["path"]).unlink(missing_ok=True)
        return {}
    if "text" in request:
        _write(pathlib.Path(request["path"]), request["text"])
        return {}
    return {path.name: _read(path) for path in pathlib.Path(request["folder"]).glob("*_*.json")}


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # which is no record, as who asks says


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(part, path)
