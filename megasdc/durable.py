"""Files that appear whole: written under a temporary name, forced to the disk, renamed."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

TEMPORARY_PREFIX = ".tmp_"
"""How names begin that are not final yet; what a killed process leaves is found by it."""
_NAME_CHARACTERS, _HOST_CHARACTERS = 150, 60  # a name may have 255 bytes


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file to write, which takes a path's name at the end of the block; after an exception nothing has changed.

    Content and name are on the disk afterwards. Readers see all of the old content or all of the new.

    Args:
        path: of the file; its folder exists.
        mode: ``w`` for text in UTF-8, ``wb`` for bytes.
    """
    owner = f"{socket.gethostname()[:_HOST_CHARACTERS]}.{os.getpid()}"  # hosts may share the folder
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name[:_NAME_CHARACTERS]}.{owner}")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_path(path.parent)


def write_durably(path: Path, text: str) -> None:
    """Replace a text file, see ``replacing``."""
    with replacing(path) as file:
        file.write(text)


def sync_path(path: Path | str) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
