"""Cache of sample indices: one folder each, built by the first process that needs it, complete or absent.

A file lock lets one process build while the others wait; one rename makes the folder appear. This needs no collective,
works for shared and for node-local folders, and a killed process leaves no partial index that a later run would use.
Checksums of all files are compared when an index is mapped; a damaged one is rebuilt.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from megasdc.common.durable import parse_json, rename_durably, replacing, write_durably
from megasdc.common.program import write_atomically
from megasdc.common.run_lock import open_lock_file
from megasdc.data.manifest import checksum_file

logger = logging.getLogger(__name__)

CACHE_FOLDER = ".index_cache"
CHECKSUMS_FILE = "checksums.json"
"""XXH3-64 of each array's file, by name."""
TOLD_S, POLL_S = 10.0, 0.05
"""Until it is told that a lock is waited for, and between two looks at it."""
Arrays = tuple[np.ndarray, ...]
OnDamage = Callable[[Path, str], object]
"""Called with the folder of a rebuilt index and its problem, in the one process that rebuilds it."""


def ignore_problem(folder: Path, problem: str) -> None:
    """Default ``OnDamage``: does nothing beyond the logged warning."""


def kept_index(
    folder: Path, names: Sequence[str], build: Callable[[], Arrays], on_damage: OnDamage = ignore_problem
) -> Arrays:
    """The arrays of a cached index, memory-mapped; built and saved if missing or damaged. No collective.

    The folder's name must identify everything that the content depends on; ``build`` makes the arrays in the order of
    ``names``. If they cannot be saved, those are returned, with a warning.
    """
    try:
        if folder.is_dir():
            return _load(folder, names)
    except ValueError:
        pass  # another process may be rebuilding it; checked again under the lock
    try:
        with _locked(folder.parent / "lock") as alone:
            arrays = None
            try:
                if folder.is_dir():
                    return _load(folder, names)
            except ValueError as problem:
                arrays = build()
                if _add_checksums(folder, names, arrays):
                    return _load(folder, names)
                # Renamed, not removed: a run on another host may have it mapped.
                aside = tempfile.mkdtemp(prefix="damaged-", dir=folder.parent)
                os.rename(folder, aside)
                logger.warning("sample index %s is rebuilt, the old one is %s: %s", folder, aside, problem)
                on_damage(folder, str(problem))
            for left in folder.parent.glob("partial-*") if alone else ():
                shutil.rmtree(left)  # left by a killed process
            _save(folder, names, arrays or build())
        return _load(folder, names)
    except (OSError, ValueError) as error:
        logger.warning("no sample index can be kept in %s (%s); it is rebuilt in every process", folder, error)
        return build()


def _load(folder: Path, names: Sequence[str]) -> Arrays:
    """Memory-map a cached index; ValueError with the problem if it is damaged, or was saved without checksums."""
    paths = [folder / f"{name}.npy" for name in names]
    if not (folder / CHECKSUMS_FILE).exists():
        raise ValueError("an earlier version kept it without checksums, and it has other content")
    try:
        expected = parse_json((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        for path in paths:
            if (found := checksum_file(path)) != expected[path.name]:
                raise ValueError(f"{path.name} has checksum {found}, expected {expected[path.name]}")
        return tuple(np.load(path, mmap_mode="r") for path in paths)
    except (OSError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _add_checksums(folder: Path, names: Sequence[str], arrays: Arrays) -> bool:
    """Add checksums to an index of an earlier version without them; returns whether it has the expected content."""
    if (folder / CHECKSUMS_FILE).exists():
        return False
    paths = [folder / f"{name}.npy" for name in names]
    try:
        same = all(np.array_equal(np.load(path), array) for path, array in zip(paths, arrays, strict=True))
    except (OSError, EOFError, ValueError):
        return False
    if same:
        write_atomically(folder / CHECKSUMS_FILE, json.dumps({path.name: checksum_file(path) for path in paths}))
    return same


def _save(folder: Path, names: Sequence[str], arrays: Arrays) -> None:
    """Save an index atomically, by one rename."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        for name, array in zip(names, arrays, strict=True):
            with replacing(partial / f"{name}.npy", "wb") as file:
                np.save(file, array)
        checksums = {path.name: checksum_file(path) for path in partial.iterdir()}
        write_durably(partial / CHECKSUMS_FILE, json.dumps(checksums))
        partial.chmod(0o755)  # mkdtemp makes it private; other users may train on the same data
        rename_durably(partial, folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():  # else another process was first, with the same content
            raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a file lock; yields false if the file system has no locks: then the rename lets one writer win."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock_file(path) as file:
        yield _lock(file, path)


def _lock(file: IO[Any], path: Path) -> bool:
    """Wait for a lock, and say so once where that takes long; false: the file system has none."""
    tell_at: float | None = time.monotonic() + TOLD_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if tell_at is not None and time.monotonic() > tell_at:
                logger.warning("waiting for another process, which builds an index of samples and holds %s", path)
                tell_at = None
            time.sleep(POLL_S)
        except OSError as error:
            logger.warning("%s cannot be locked (%s)", path, error)
            return False
