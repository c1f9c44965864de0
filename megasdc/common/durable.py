"""Files and folders that appear whole: written under a temporary name, forced to the disk, renamed; JSON of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

TEMPORARY_PREFIX = ".tmp_"
"""How names begin that are not final yet; what a killed process leaves is found by it."""
REPLACED_PREFIX = f"{TEMPORARY_PREFIX}replaced_"
"""How the name of a folder begins that ``commit_folder`` has moved aside."""
_NAME_CHARACTERS = 150  # a name may have 255 bytes
_UNFINISHED = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}.+\.[0-9a-f]{{32}}", re.DOTALL)
"""Names that ``replacing`` gives."""


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file to write, which takes a path's name at the end of the block; after an exception nothing has changed.

    Content and name are on the disk afterwards. Readers see all of the old content or all of the new.

    Args:
        path: of the file; its folder exists.
        mode: ``w`` for text in UTF-8, ``wb`` for bytes.
    """
    # Hosts may share the folder, threads may replace the same file, and whoever else may write there must not be able
    # to put a link in its place.
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name[:_NAME_CHARACTERS]}.{secrets.token_hex(16)}")
    file = open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8")  # noqa: SIM115 - below
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_path(path.parent)


def remove_unfinished(folder: Path, older_than_s: float) -> None:
    """Remove files that ``replacing`` has left in a folder where its process was killed; what cannot be removed stays.

    Args:
        folder: need not exist.
        older_than_s: seconds since such a file was written last; younger ones may be written still, by any host.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _UNFINISHED.fullmatch(entry.name) is None:
                continue
            with contextlib.suppress(OSError):
                seen = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(seen.st_mode) and time.time() - seen.st_mtime > older_than_s:
                    os.unlink(entry.path)


def write_durably(path: Path, text: str) -> None:
    """Replace a text file, see ``replacing``."""
    with replacing(path) as file:
        file.write(text)


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text; ValueError where it is none, nested too deeply included, which ``json`` tells otherwise."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def append_bounded(path: Path, text: str, largest: int) -> None:
    """Append whole lines to a file, whose older half goes first where it has more than ``largest`` bytes.

    A last line that was cut off, when a process was killed, gets its end.
    """
    if path.exists() and path.stat().st_size > largest:
        lines = path.read_bytes().splitlines(keepends=True)
        with replacing(path, "wb") as file:
            file.writelines(lines[len(lines) // 2 :])
    with open(path, "ab+", buffering=0) as file:
        if size := file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        data = text.encode()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            os.ftruncate(file.fileno(), size)  # there was room for a part of it
            raise


def sync_path(path: Path | str) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or a folder, and wait until its new name is on the disk and its old one gone.

    Raises:
        OSError: as ``os.rename``; or the names did not reach the disk, then it is renamed here nevertheless.
    """
    os.rename(source, target)
    for folder in dict.fromkeys((target.parent, source.parent)):
        sync_path(folder)


def commit_folder(temporary: Path, final: Path) -> None:
    """Rename a written folder to its final name.

    An existing folder of that name is moved aside first, under ``REPLACED_PREFIX``, and deleted afterwards. Of an
    existing link, only the link is replaced.

    Raises:
        OSError: the rename failed; all names are restored.
    """
    aside = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    replaces = os.path.lexists(final)
    if replaces:
        remove_entry(aside)
        os.rename(final, aside)
    try:
        rename_durably(temporary, final)
    except OSError:
        if not os.path.lexists(temporary):
            os.rename(final, temporary)
        if replaces:
            os.rename(aside, final)
        raise
    remove_entry(aside)


def remove_entry(path: Path) -> None:
    """Remove a folder with its content, a file, or a link but not its target; does nothing if it does not exist.

    Errors while removing a folder are ignored.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
