"""What a supervisor plans and does, an entry a line: after it was killed the same command goes on from there; no torch.

An entry that plans something is on the disk before it is done. Each line has a checksum of itself and of all lines
before it; a last line that was cut off, when the supervisor was killed, is removed. Since each line also holds that
checksum, a damaged line costs no other one: a supervisor writes the journal anew from those that are whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from megasdc.common.durable import TEMPORARY_PREFIX, parse_json, sync_path, wait_for_room
from megasdc.common.errors import LaunchError, StorageError
from megasdc.common.origin import Moment
from megasdc.common.run_lock import open_lock_file

FOLDER, JOURNAL_FILE, LOCK_FILE = "supervise", "journal.jsonl", ".lock"
"""In the run folder, and in that one."""
DAMAGED = "damaged"
"""Kind of the entry that says that the journal was written anew: ``aside``, the name of the damaged file beside it,
``problem``, and ``lost``, the number of its lines that could not be read."""
_CHECKSUM = re.compile(rb"[0-9a-f]{16}")
"""The last one of a line is its checksum, unless a digit of it is damaged."""


@dataclass(frozen=True)
class JournalEntry:
    """One line.

    Args:
        number: the first is 1.
        time: seconds since the epoch.
        kind: of ``megasdc.ops.supervise.history``.
        fields: plain values.
        monotonic: seconds on the monotonic clock of the supervisor's host; None: of an earlier version.
        boot: id of its kernel since it was booted; None: likewise.
    """

    number: int
    time: float
    kind: str
    fields: dict[str, Any]
    monotonic: float | None = None
    boot: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        """What its line holds."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def seconds_to(self, other: JournalEntry | Moment) -> float:
        """Seconds from this to a later moment: by the monotonic clock of one boot, else by dates; at least 0."""
        boot = other.boot if isinstance(other, JournalEntry) else other.boot_id
        if boot is not None and boot == self.boot and self.monotonic is not None and other.monotonic is not None:
            return max(0.0, other.monotonic - self.monotonic)
        return max(0.0, other.time - self.time)


def _new(path: str, flags: int) -> int:
    """Open a file that is not there yet."""
    return os.open(path, flags | os.O_EXCL, 0o666)


Rebuild = Callable[[Sequence[JournalEntry]], Sequence[JournalEntry]]
"""From the entries of whole lines to those that a journal begins with that is written anew."""


class Journal:
    """The journal of a run, open for one supervisor at a time; a context manager.

    Args:
        folder: it lies in, made where it is absent.
        say: receives a message where a line that was cut off is removed, where the journal is written anew, and where
            an entry waits for room.
        rebuild: completes the entries of whole lines where one is damaged; None: that is an error.

    Attributes:
        entries: all of them, oldest first.

    Raises:
        LaunchError: another supervisor has it.
        StorageError: it was changed and there is no ``rebuild``, or it cannot be read or written.

    An entry waits for room (``megasdc.common.durable``). A file server that takes this host for lost may give the lock
    to another supervisor. So each entry is written only where the file still is as this one has left it, at each try.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], rebuild: Rebuild | None = None) -> None:
        self.path, self._size, self._say = folder / JOURNAL_FILE, 0, say
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open_lock_file(folder / LOCK_FILE)
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - open as long as this lives
        except OSError as error:
            raise StorageError(f"the supervisor's journal {self.path} cannot be opened: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._file.fileno()).st_ino != self.path.stat().st_ino:
                raise BlockingIOError("another supervisor has just written it anew")
            self.entries, self._checksum = self._read(say, rebuild)
        except BlockingIOError as error:
            self.close()
            raise LaunchError(f"{self.path} is in use by another supervisor of this run; wait for its end") from error
        except OSError as error:
            self.close()
            raise StorageError(f"the supervisor's journal {self.path} cannot be read: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another supervisor have it; idempotent."""
        self._file.close()
        self._lock.close()

    def write(self, kind: str, **fields: Any) -> JournalEntry:
        """Add an entry, which is on the disk on return.

        Raises:
            LaunchError: another supervisor has gone on with the run meanwhile; nothing is written.
            StorageError: it cannot be written.
        """
        number = len(self.entries) + 1
        now = Moment.now()
        # Of more digits than a float has the last one may change, and nothing would show it.
        content = {"number": number, "time": round(now.time, 6), "kind": kind, "fields": fields}
        content |= {"monotonic": None if now.monotonic is None else round(now.monotonic, 6), "boot": now.boot_id}
        line, checksum = _line(self._checksum, content)
        try:
            wait_for_room(lambda: self._append(line.encode()), self.path, self._say)
        except OSError as error:
            raise StorageError(f"the supervisor's journal {self.path} cannot be written: {error}") from error
        self._checksum, self._size = checksum, self._size + len(line)
        entry = JournalEntry(**json.loads(json.dumps(content)))  # as a later supervisor reads it
        self.entries.append(entry)
        return entry

    def _append(self, line: bytes) -> None:
        """Append a line to what is this supervisor's, and wait until it is on the disk; an error changes nothing."""
        self.check_owned()
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise

    def check_owned(self) -> None:
        """Let go on only the supervisor whose run this is.

        Raises:
            LaunchError: another supervisor has gone on with the run.
            StorageError: the file is not there, or cannot be read.
        """
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

    def _read(self, say: Callable[[str], None], rebuild: Rebuild | None) -> tuple[list[JournalEntry], str]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        tail = content[len(whole) :]
        if tail and _entry_of(tail[:-1]) is not None:  # it was written to its end, whose newline is damaged
            return self._anew(content[:-1] + b"\n", "the end of its last line was changed", say, rebuild)
        if tail:
            say(f"{self.path}: a line that was not written to its end is removed")
            os.ftruncate(self._file.fileno(), len(whole))
        self._size = len(whole)
        try:
            return _parse(whole, self.path)
        except StorageError as error:
            return self._anew(whole, str(error), say, rebuild)

    def _anew(
        self, lines: bytes, problem: str, say: Callable[[str], None], rebuild: Rebuild | None
    ) -> tuple[list[JournalEntry], str]:
        """Write the journal anew from its whole lines; the damaged file stays under another name."""
        if rebuild is None:
            raise StorageError(problem)
        kept = whole_lines(lines)
        number = 1
        while (aside := self.path.with_name(f"journal_damaged_{number:03d}.jsonl")).exists():
            number += 1
        lost = len(lines.splitlines()) - len(kept)
        fields = {"aside": aside.name, "problem": problem, "lost": lost}
        entries = [*rebuild(kept), JournalEntry(0, time.time(), DAMAGED, fields)]
        entries = [replace(one, number=at) for at, one in enumerate(entries, 1)]
        checksum, text = "", b""
        for entry in entries:
            line, checksum = _line(checksum, entry.content)
            text += line.encode()
        temporary = self.path.with_name(f"{TEMPORARY_PREFIX}{JOURNAL_FILE}")
        temporary.unlink(missing_ok=True)
        file = open(temporary, "a+b", buffering=0, opener=_new)  # noqa: SIM115 - open as long as this lives
        try:
            file.write(text)
            os.fsync(file.fileno())
            _back_up(self.path, aside)
            os.replace(temporary, self.path)
            sync_path(self.path.parent)
        except BaseException:
            file.close()
            raise
        self._file.close()
        self._file, self._size = file, len(text)
        say(
            f"{problem.partition('; ')[0]}: it is written anew from {len(kept)} whole lines and the records of attempts"
        )
        say(f"the damaged journal is kept in {aside}")
        return entries, checksum


def _back_up(path: Path, aside: Path) -> None:
    """Give a file a second name; on file systems without links that is a copy."""
    try:
        os.link(path, aside)
    except OSError:
        shutil.copyfile(path, aside)


def whole_lines(lines: bytes) -> list[JournalEntry]:
    """Entries of the lines that are as they were written, oldest first.

    A line is if its checksum follows from its content and the checksum of the line before, whatever else that line
    still says; and if the next line follows from it, though its own checksum is damaged.
    """
    found, before = list[JournalEntry](), {""}
    unsure: tuple[JournalEntry | None, str] = None, ""
    for line in lines.splitlines():
        entry, claimed = _entry_of(line), next((match.decode() for match in _CHECKSUM.findall(line)[-1:]), "")
        follows = {} if entry is None else {_chained(one, entry.content): one for one in before}
        if entry is not None and claimed in follows:
            if unsure[0] is not None and follows[claimed] != unsure[1]:
                found.append(unsure[0])
            found.append(entry)
            unsure, before = (None, ""), {claimed}
        else:
            unsure, before = (entry, claimed), {claimed, *follows}
    return found


def without_steps(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Entries with the times of a clock that nobody sets: that of the first, and what has passed since then."""
    found: list[JournalEntry] = []
    for before, entry in zip([None, *entries], entries, strict=False):
        found.append(entry if before is None else replace(entry, time=found[-1].time + before.seconds_to(entry)))
    return found


def read_journal(folder: Path) -> list[JournalEntry]:
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


def _parse(lines: bytes, path: Path) -> tuple[list[JournalEntry], str]:
    """Entries, and the checksum of all of them."""
    entries, checksum = list[JournalEntry](), ""
    for number, line in enumerate(lines.splitlines(), 1):
        where = f"line {number} of the supervisor's journal {path}"
        remedy = "the next start of the supervisor writes it anew from the others, and keeps the damaged file"
        try:
            raw = parse_json(line)
            claimed = raw.pop("checksum")
            entry = JournalEntry(**raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(f"{where} cannot be read: {error!r}; {remedy}") from error
        checksum = _chained(checksum, raw)
        if claimed != checksum or entry.number != number:
            raise StorageError(f"{where} was changed; {remedy}")
        entries.append(entry)
    return entries, checksum


def _entry_of(line: bytes) -> JournalEntry | None:
    """What a line holds, whatever its checksum; None: it is no entry."""
    try:
        raw = parse_json(line)
        del raw["checksum"]
        return JournalEntry(**raw)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _line(before: str, content: dict[str, Any]) -> tuple[str, str]:
    """A line, and the checksum of it and of all before it."""
    checksum = _chained(before, content)
    return json.dumps({**content, "checksum": checksum}) + "\n", checksum


def _chained(before: str, content: dict[str, Any]) -> str:
    """Checksum of a line and of all before it."""
    return xxhash.xxh3_64((before + json.dumps(content)).encode()).hexdigest()
