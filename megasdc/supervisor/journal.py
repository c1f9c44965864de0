"""What a supervisor plans and does, an entry a line: after it was killed the same command goes on from there; no torch.

An entry that plans something is on the disk before it is done. Each line has a checksum of itself and of all lines
before it; a last line that was cut off, when the supervisor was killed, is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from megasdc.errors import LaunchError, StorageError

FOLDER, JOURNAL_FILE = "supervise", "journal.jsonl"
"""In the run folder, and in that one."""


@dataclass(frozen=True)
class Entry:
    """One line.

    Args:
        number: the first is 1.
        time: seconds since the epoch.
        kind: of ``megasdc.supervisor.history``.
        fields: plain values.
    """

    number: int
    time: float
    kind: str
    fields: dict[str, Any]


class Journal:
    """The journal of a run, open for one supervisor at a time; a context manager.

    Args:
        folder: it lies in, made where it is absent.
        say: receives a message where a line that was cut off is removed.

    Attributes:
        entries: all of them, oldest first.

    Raises:
        LaunchError: another supervisor has it.
        StorageError: it was changed, or cannot be read or written.

    A file server that takes this host for lost may give the lock to another supervisor. So each entry is written only
    where the file still is as this one has left it.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.path, self._size = folder / JOURNAL_FILE, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - open as long as this lives
        except OSError as error:
            raise StorageError(f"the supervisor's journal {self.path} cannot be opened: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.entries, self._checksum = self._read(say)
        except BlockingIOError as error:
            self._file.close()
            raise LaunchError(f"{self.path} is in use by another supervisor of this run; wait for its end") from error
        except OSError as error:
            self._file.close()
            raise StorageError(f"the supervisor's journal {self.path} cannot be read: {error}") from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, kind: str, **fields: Any) -> Entry:
        """Add an entry, which is on the disk on return.

        Raises:
            LaunchError: another supervisor has gone on with the run meanwhile; nothing is written.
            StorageError: it cannot be written.
        """
        self._check_owned()
        number = len(self.entries) + 1
        content = {"number": number, "time": time.time(), "kind": kind, "fields": fields}
        checksum = _chained(self._checksum, content)
        line = json.dumps({**content, "checksum": checksum}) + "\n"
        try:
            self._file.write(line.encode())
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"the supervisor's journal {self.path} cannot be written: {error}") from error
        self._checksum, self._size = checksum, self._size + len(line)
        entry = Entry(**json.loads(json.dumps(content)))  # as a later supervisor reads it
        self.entries.append(entry)
        return entry

    def _check_owned(self) -> None:
        """Raise LaunchError if the file has another's entries, or is another one; StorageError if it is not there."""
        try:
            with open(self.path, "rb") as now:  # opened anew, a file server is asked
                found, own = os.fstat(now.fileno()), os.fstat(self._file.fileno())
        except OSError as error:
            raise StorageError(f"the supervisor's journal {self.path} cannot be written: {error}") from error
        if (found.st_dev, found.st_ino, found.st_size) != (own.st_dev, own.st_ino, self._size):
            raise LaunchError(
                f"{self.path} was changed by another supervisor of this run, which the file server has given the lock "
                "of this one; this one ends, what it has started goes on"
            )

    def _read(self, say: Callable[[str], None]) -> tuple[list[Entry], str]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            say(f"{self.path}: a line that was not written to its end is removed")
            os.ftruncate(self._file.fileno(), len(whole))
        self._size = len(whole)
        return _parse(whole, self.path)


def read_journal(folder: Path) -> list[Entry]:
    """Entries of the journal in a supervisor's folder, oldest first, also while one writes; none where there is none.

    Raises:
        StorageError: it was changed, or cannot be read.
    """
    path = folder / JOURNAL_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"the supervisor's journal {path} cannot be read: {error}") from error
    return _parse(content[: content.rfind(b"\n") + 1], path)[0]


def _parse(lines: bytes, path: Path) -> tuple[list[Entry], str]:
    """Entries, and the checksum of all of them."""
    entries, checksum = list[Entry](), ""
    for number, line in enumerate(lines.splitlines(), 1):
        where = f"line {number} of the supervisor's journal {path}"
        remedy = "move the file away to supervise the run anew: its checkpoints stay"
        try:
            raw = json.loads(line)
            claimed = raw.pop("checksum")
            entry = Entry(**raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(f"{where} cannot be read: {error!r}; {remedy}") from error
        checksum = _chained(checksum, raw)
        if claimed != checksum or entry.number != number:
            raise StorageError(f"{where} was changed; {remedy}")
        entries.append(entry)
    return entries, checksum


def _chained(before: str, content: dict[str, Any]) -> str:
    """Checksum of a line and of all before it."""
    return xxhash.xxh3_64((before + json.dumps(content)).encode()).hexdigest()
