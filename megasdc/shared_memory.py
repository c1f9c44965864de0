"""Where files in memory lie that other processes of a host read, and that outlive the one that wrote them; no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SNAPSHOT_SHARE = 0.8
"""Of the free memory that snapshots of a state may take."""


def shared_folder() -> Path:
    """Shared memory where the system has it; else the folder of temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def own_prefix() -> str:
    """How names of this user's folders there begin."""
    return f"megasdc-{os.getuid()}-"
