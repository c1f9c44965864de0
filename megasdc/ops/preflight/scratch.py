"""Folders that a preflight writes to, of its own, one preflight of a run at a time; removed at its end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from megasdc.common.errors import LaunchError, StorageError
from megasdc.common.run_lock import WITHOUT_FLOCK, open_lock_file

FOLDER, LOCK_FILE = "preflight", ".lock"
"""The first in the run folder, and in that of checkpoints where one is configured."""
_ENDING_S = 5.0
"""Seconds in which what a preflight has ended may still write into its folder, or remove what it wrote."""

Say = Callable[[str], None]


@contextlib.contextmanager
def scratch_folder(parent: Path, name: str, *, keep: bool, say: Say) -> Iterator[Path]:
    """A new folder ``preflight/NAME``; at the end it goes, and so do folders above that were made for it.

    Args:
        parent: the folder that it lies in, made where it is absent.
        keep: it stays.
        say: receives a message where it cannot be removed.

    Raises:
        LaunchError: another preflight works there.
        StorageError: the folder cannot be written.
    """
    above = parent / FOLDER
    made = [folder for folder in (above, *above.parents) if not folder.exists()]
    lock = _lock(above)
    try:
        folder = above / name
        try:
            folder.mkdir()
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            yield folder
        finally:
            if not keep:
                _remove(folder, say)
    finally:
        with contextlib.suppress(OSError):
            (above / LOCK_FILE).unlink()
        lock.close()
        if not keep:
            for one in made:
                with contextlib.suppress(OSError):  # something else was put there meanwhile
                    one.rmdir()


def _lock(folder: Path) -> IO[str]:
    """Make a folder and lock it; returns an open file, with which the lock goes."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open_lock_file(folder / LOCK_FILE)
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat((folder / LOCK_FILE).stat(), os.fstat(file.fileno())):
                return file
        except FileNotFoundError:
            pass  # who had it has just ended, and removed it
        except BlockingIOError as error:
            file.close()
            raise LaunchError(f"{folder} is in use by another preflight of this run; wait for its end") from error
        except OSError as error:
            if error.errno in WITHOUT_FLOCK:
                return file
            file.close()
            raise _unwritable(folder, error) from error
        file.close()


def _unwritable(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"{folder} cannot be written: {error.strerror}; free space, or get the right to")


def _remove(folder: Path, say: Say) -> None:
    until = time.monotonic() + _ENDING_S
    while folder.exists():  # else another host of the run has removed it
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or time.monotonic() > until:
                say(f"{folder} cannot be removed: {error}; remove it by hand")
                return
            time.sleep(0.05)
