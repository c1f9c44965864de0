"""How do bytes reach the disk for good? Durable writes, checksums, and the names in a checkpoint folder."""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

LATEST_FILE = "latest"
MANIFEST_FILE = "manifest.json"
MARKER_FILE = "complete"
SHARED_STATE_FILE = "megasdc.json"
UNIVERSAL_FILE = "universal.json"
UNIVERSAL_STEP = "universal_step_"
WEIGHTS_FILE = "weights.json"
TEMPORARY_PREFIX = ".tmp_"
REPLACED_PREFIX = ".tmp_replaced_"
_CHUNK_BYTES = 1 << 22
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


def step_folder(step: int) -> str:
    """Name of the folder of a step's checkpoint, such as ``step_00000123``."""
    return f"step_{step:08d}"


def rank_state_file(rank: int) -> str:
    """Name of the file with a rank's own state, such as ``rank_00003_state.pt``."""
    return f"rank_{rank:05d}_state.pt"


def list_steps(folder: Path | str) -> list[int]:
    """Steps that have a committed folder, in ascending order; complete or not. Empty if the folder is not there."""
    path = Path(folder)
    if not path.is_dir():
        return []
    matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def list_replaced(folder: Path | str) -> list[int]:
    """Steps whose checkpoint a save that was killed had moved aside; ``remove_leftovers`` brings them back."""
    names = (entry.name.removeprefix(REPLACED_PREFIX) for entry in Path(folder).glob(f"{REPLACED_PREFIX}*"))
    return sorted(int(match.group(1)) for match in map(_STEP_FOLDER.fullmatch, names) if match)


def hash_file(path: Path | str, progress: Callable[[int], None] | None = None) -> str:
    """XXH3-128 of a file's bytes, as hexadecimal digits.

    Args:
        path: the file.
        progress: called with the number of bytes of each piece read.
    """
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_CHUNK_BYTES):
            state.update(piece)
            if progress is not None:
                progress(len(piece))
    return state.hexdigest()


@contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """A path of a folder that means itself as a pattern too; DeepSpeed (0.19.8) finds its files by patterns.

    Args:
        folder: the folder; where its path has brackets, stars or question marks, a link to it is yielded.
    """
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="megasdc_") as scratch:
        link = Path(scratch) / "checkpoint"
        link.symlink_to(folder.resolve())
        yield link


def sync_path(path: Path | str) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replace a text file so that after a crash it has either all of the old or all of the new text."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def commit_folder(temporary: Path, final: Path) -> None:
    """Give a written folder its name by one rename.

    A folder that has the name already is moved aside first and deleted afterwards; ``remove_leftovers`` brings it back
    if the process dies in between. Of a link that has the name, only the link is.

    Raises:
        OSError: it could not be; every name is again what it was.
    """
    aside = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    replaces = os.path.lexists(final)
    if replaces:
        remove_entry(aside)
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
        sync_path(final.parent)
    except OSError:
        if not os.path.lexists(temporary):
            os.rename(final, temporary)
        if replaces:
            os.rename(aside, final)
        raise
    remove_entry(aside)


def remove_entry(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link, whose target stays; nothing if it is not there.

    What of a folder cannot be removed is left.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def delete_folder(folder: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a half-deleted one is never taken for a checkpoint."""
    aside = folder.with_name(f"{TEMPORARY_PREFIX}delete_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    shutil.rmtree(aside)


def remove_leftovers(folder: Path | str) -> list[str]:
    """Remove what killed saves have left in a checkpoint folder.

    A checkpoint that had been moved aside for a newer one of the same step which never came gets its name back.

    Args:
        folder: the checkpoint folder; nothing happens if it is not there.

    Returns:
        What was done, one line an entry.
    """
    path = Path(folder)
    done: list[str] = []
    if not path.is_dir():
        return done
    for entry in sorted(path.glob(f"{TEMPORARY_PREFIX}*")):
        final = path / entry.name.removeprefix(REPLACED_PREFIX)
        if entry.name.startswith(REPLACED_PREFIX) and entry.is_dir() and not final.exists():
            os.rename(entry, final)
            done.append(f"{final.name} restored: the save that was to replace it did not finish")
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
        done.append(f"{entry.name} removed: left by a save that did not finish")
    return done
