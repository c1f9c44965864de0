"""Where are sample indices kept? In a folder each, made by whoever comes first, whole or not at all.

A file lock lets one process build while the others wait; one rename makes the folder appear. This needs no collective,
works for shared and for node-local folders, and a killed process leaves no half index that a later run takes for whole.
Every byte is compared with its checksum when an index is mapped; one that is damaged is built again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megasdc.data.manifest import checksum_file
from megasdc.program import write_whole

logger = logging.getLogger(__name__)

CACHE_FOLDER = ".index_cache"
CHECKSUMS_FILE = "checksums.json"
"""XXH3-64 of each array's file, by name."""
Arrays = tuple[np.ndarray, ...]
OnDamage = Callable[[Path, str], object]
"""Told the folder of an index that is built again, and what was wrong with it, by the one process that does so."""


def tell_nobody(folder: Path, problem: str) -> None:
    """The warning is enough."""


def kept_index(
    folder: Path, names: Sequence[str], build: Callable[[], Arrays], on_damage: OnDamage = tell_nobody
) -> Arrays:
    """Return the arrays of a kept index, mapped into memory; build and keep them if they are not there or damaged.

    Args:
        folder: of this index alone; its name stands for everything that the content depends on.
        names: of the arrays.
        build: makes the arrays, in the order of the names.
        on_damage: see `OnDamage`; a warning says it too.

    Returns:
        The arrays. Where none can be kept, those that `build` made, with a warning.

    Collective:
        None.
    """
    try:
        if folder.is_dir():
            return _load(folder, names)
    except ValueError:
        pass  # another process may be building it again at this moment
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
                # Not removed: a run on another host may have it mapped.
                aside = tempfile.mkdtemp(prefix="damaged-", dir=folder.parent)
                os.rename(folder, aside)
                logger.warning("sample index %s is built again, the old one is %s: %s", folder, aside, problem)
                on_damage(folder, str(problem))
            for left in folder.parent.glob("partial-*") if alone else ():
                shutil.rmtree(left)  # of a killed process
            _save(folder, names, arrays or build())
        return _load(folder, names)
    except (OSError, ValueError) as error:
        logger.warning("no sample index can be kept in %s (%s); it is built again in every process", folder, error)
        return build()


def _load(folder: Path, names: Sequence[str]) -> Arrays:
    """Map a kept index into memory.

    Raises:
        ValueError: it is damaged, or an earlier version kept it without checksums; the message says what is wrong.
    """
    paths = [folder / f"{name}.npy" for name in names]
    if not (folder / CHECKSUMS_FILE).exists():
        raise ValueError("an earlier version kept it without checksums, and it has other content")
    try:
        expected = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        for path in paths:
            if (found := checksum_file(path)) != expected[path.name]:
                raise ValueError(f"{path.name} has checksum {found}, expected {expected[path.name]}")
        return tuple(np.load(path, mmap_mode="r") for path in paths)
    except (OSError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _add_checksums(folder: Path, names: Sequence[str], arrays: Arrays) -> bool:
    """Complete an index that an earlier version kept without checksums; returns whether it has the expected content."""
    if (folder / CHECKSUMS_FILE).exists():
        return False
    paths = [folder / f"{name}.npy" for name in names]
    try:
        same = all(np.array_equal(np.load(path), array) for path, array in zip(paths, arrays, strict=True))
    except (OSError, EOFError, ValueError):
        return False
    if same:
        write_whole(folder / CHECKSUMS_FILE, json.dumps({path.name: checksum_file(path) for path in paths}))
    return same


def _save(folder: Path, names: Sequence[str], arrays: Arrays) -> None:
    """Keep an index by one rename."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        for name, array in zip(names, arrays, strict=True):
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        checksums = {path.name: checksum_file(path) for path in partial.iterdir()}
        (partial / CHECKSUMS_FILE).write_text(json.dumps(checksums), encoding="utf-8")
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
