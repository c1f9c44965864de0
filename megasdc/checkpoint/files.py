"""Files of a checkpoint folder: names, checksums, deletion, what killed saves left."""

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

from megasdc.common.durable import REPLACED_PREFIX, TEMPORARY_PREFIX

LATEST_FILE = "latest"
MANIFEST_FILE = "manifest.json"
MARKER_FILE = "complete"
UNIVERSAL_FILE = "universal.json"
UNIVERSAL_STEP = "universal_step_"
WEIGHTS_FILE = "weights.json"
_CHUNK_BYTES = 1 << 22
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


def step_folder(step: int) -> str:
    """Name of the folder of a step's checkpoint, such as ``step_00000123``."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """Step of a checkpoint by the name of its folder; None: it is not named so."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def rank_state_file(rank: int) -> str:
    """Name of the file with a rank's own state, such as ``rank_00003_state.pt``."""
    return f"rank_{rank:05d}_state.pt"


def list_steps(folder: Path | str) -> list[int]:
    """Steps that have a committed folder, in ascending order; complete or not. Empty if the folder does not exist."""
    path = Path(folder)
    if not path.is_dir():
        return []
    matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def list_replaced(folder: Path | str) -> list[int]:
    """Steps whose checkpoint a killed save had moved aside; ``remove_leftovers`` restores them."""
    names = (entry.name.removeprefix(REPLACED_PREFIX) for entry in Path(folder).glob(f"{REPLACED_PREFIX}*"))
    return sorted(int(match.group(1)) for match in map(_STEP_FOLDER.fullmatch, names) if match)


def hash_file(path: Path | str, progress: Callable[[int], None] | None = None) -> str:
    """XXH3-128 of a file's bytes, as hexadecimal digits; ``progress`` gets the number of bytes of each piece read."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_CHUNK_BYTES):
            state.update(piece)
            if progress is not None:
                progress(len(piece))
    return state.hexdigest()


@contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """Yield a path of a folder without glob characters, by which DeepSpeed (0.19.8) finds its files.

    If the path has brackets, stars or question marks, it is that of a temporary link to the folder.
    """
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="megasdc_") as scratch:
        link = Path(scratch) / "checkpoint"
        link.symlink_to(folder.resolve())
        yield link


def delete_folder(folder: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a half-deleted one is never taken for a checkpoint."""
    shutil.rmtree(rename_to_delete(folder))


def rename_to_delete(folder: Path) -> Path:
    """Give a checkpoint that is to be deleted a name that is none of a checkpoint; returns its new path."""
    aside = folder.with_name(f"{TEMPORARY_PREFIX}delete_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def remove_leftovers(folder: Path | str) -> list[str]:
    """Remove what killed saves left in a checkpoint folder, which need not exist; returns the actions, one line each.

    A checkpoint that was moved aside for a newer one of the same step is restored if the newer one was not committed.
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
