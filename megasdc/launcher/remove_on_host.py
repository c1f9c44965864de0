"""Remove one stale file on one host; the text is sent there, so nothing is imported from megasdc."""

from __future__ import annotations

import os
from typing import Any


def answer(request: dict[str, Any]) -> bool:
    """Remove the file ``path``; returns whether it was still there."""
    try:
        os.remove(request["path"])
    except FileNotFoundError:
        return False
    return True
