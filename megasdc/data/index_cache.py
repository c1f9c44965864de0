"""Where are sample indices kept? In a folder each, made by whoever comes first, whole or not at all.

A file lock lets one process build while the others wait; one rename makes the folder appear. This needs no collective,
works for shared and for node-local folders, and a killed process leaves no half index that a later run takes for whole.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megasdc.errors import DataError

logger = logging.getLogger(__name__)

CACHE_FOLDER = ".index_cache"
Arrays = tuple[np.ndarray, ...]


def kept_index(folder: Path, names: Sequence[str], build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of a kept index, mapped into memory; build and keep them if they are not there.

    Args:
        folder: of this index alone; its name stands for everything that the content depends on.
        names: of the arrays.
        build: makes the arrays, in the order of the names.

    Returns:
        The arrays. Where none can be kept, those that `build` made, with a warning.

    Raises:
        DataError: the kept index is damaged.

    Collective:
        None.
    """
    if found := _load(folder, names):
        return found
    try:
        with _locked(folder.parent / "lock") as alone:
            if found := _load(folder, names):
                return found
            for left in folder.parent.glob("partial-*") if alone else ():
                shutil.rmtree(left)  # of a killed process
            _save(folder, names, build())
    except OSError as error:
        logger.warning("no sample index can be kept in %s (%s); it is built again in every process", folder, error)
        return build()
    found = _load(folder, names)
    assert found is not None, f"{folder} was just written"
    return found


def _load(folder: Path, names: Sequence[str]) -> Arrays | None:
    """Map a kept index into memory; None where there is none.

    Raises:
        DataError: it is damaged.
    """
    if not folder.is_dir():
        return None
    try:
        return tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"sample index {folder} is damaged: {error}; delete the folder, it is built again") from error


def _save(folder: Path, names: Sequence[str], arrays: Arrays) -> None:
    """Keep an index by one rename."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        for name, array in zip(names, arrays, strict=True):
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        partial.chmod(0o755)  # mkdtemp makes it private; other users may train on the same data
        os.rename(partial, folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():  # else another process was first, with the same content
            raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a file lock; yields false where the file system has none, and the rename lets one writer win."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError as error:
            logger.warning("%s cannot be locked (%s)", path, error)
            alone = False
        yield alone
