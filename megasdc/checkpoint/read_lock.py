"""Holding a checkpoint while its files are read, so that a run that keeps only its newest does not delete it meanwhile.

The hold is a kernel's lock (flock) on the manifest, shared by readers; who deletes must get it alone. It ends with the
process that has it. On a file system without flock nothing is held: a reader then finds that files are missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megasdc.checkpoint.files import MANIFEST_FILE, rename_to_delete
from megasdc.common.errors import CheckpointError
from megasdc.common.run_lock import WITHOUT_FLOCK


@contextlib.contextmanager
def held_for_reading(folder: Path) -> Iterator[int]:
    """Context in which a checkpoint is not deleted by its run; CheckpointError if it is being deleted, or not there.

    Yields the descriptor that holds it: a process that inherits it holds it on.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder / MANIFEST_FILE, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            if not _lock(descriptor, fcntl.LOCK_SH):
                raise CheckpointError(f"{folder} is being deleted: name a newer checkpoint")
        except OSError as error:
            raise CheckpointError(f"{folder / MANIFEST_FILE} cannot be read: {error.strerror}") from error
        yield descriptor


@contextlib.contextmanager
def held_alone(folder: Path) -> Iterator[bool]:
    """Context in which nobody begins to read a checkpoint; yields whether nobody reads it now.

    OSError if its manifest cannot be opened for writing, which NFS needs for such a lock.
    """
    descriptor = os.open(folder / MANIFEST_FILE, os.O_RDWR)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def delete_unheld(folder: Path) -> str | None:
    """Delete a checkpoint that nobody reads; returns why it was not deleted, None: it was."""
    try:
        with held_alone(folder) as free:
            aside = rename_to_delete(folder) if free else None
        if aside is None:
            return f"{folder} is being archived: a later save deletes it"
        shutil.rmtree(aside)
    except OSError as error:
        return f"{folder} cannot be deleted: {error}"
    return None


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_FLOCK:
            raise
    return True
