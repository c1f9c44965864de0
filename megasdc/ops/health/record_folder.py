"""Folders of progress records in shared memory, and those that killed runs have left."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path

from megasdc.common.host import GONE, own_folders, own_prefix, process_state, shared_folder
from megasdc.ops.health.agent import read_agent
from megasdc.ops.health.record import RecordReader

LEFT_S = 600.0
"""Records whose folder has not changed for so long, and whose processes are gone, are nobody's."""


def record_folder(run: str, node: int) -> Path:
    """Folder of the records of a host.

    Args:
        run: name of the start, with a part that other users cannot guess, who else could make the folder first.
        node: index of the host.
    """
    return shared_folder() / f"{own_prefix()}{run}-{node}"


def remove_old_records() -> None:
    """Remove records of earlier runs of this user whose processes were all killed, their agent too."""
    for folder in own_folders(own_prefix()):
        if folder.name.startswith(f"{own_prefix()}memory-"):
            continue
        try:
            is_old = time.time() - folder.stat().st_mtime > LEFT_S
            agent = read_agent(folder)
            pids = [] if agent is None else [agent]
            pids += [asdict(RecordReader(path).identity) for path in folder.glob("rank_*.record")]
        except (OSError, ValueError):
            continue
        if is_old and all(process_state(one["pid"], one["started_at"]) == GONE for one in pids):
            shutil.rmtree(folder, ignore_errors=True)
