"""Reads the small files of one folder on one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import pathlib
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return the content of every ``*_*.json`` in ``folder`` by name; empty if the folder does not exist."""
    return {path.name: path.read_text() for path in pathlib.Path(request["folder"]).glob("*_*.json")}
