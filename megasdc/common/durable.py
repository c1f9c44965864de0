"""Durable writes: files and folders that appear whole and survive a power cut, and writes that wait for disk space.

A file or folder is written under a temporary name, forced to the disk, and renamed.

All writers of a run's folder follow one rule while it has no room: a full file system, a quota that is used up, or a
file system that has become read-only. Lines (``LineFile``) and small files (``write_when_room``) are kept in the memory
of the process that writes them, and written as soon as there is room. A writer that needs its file to continue tries
again each second (``wait_for_room``). Both end after ``limit_s`` without room: then the ranks of a run stop together
(``megasdc.train.stop``), and others raise the system's error. A process that is asked to end waits for ``END_S`` more.
Lines that do not fit into ``MAX_KEPT_BYTES`` are lost, counted and reported. Lines and small files, which nobody needs
at once, are kept likewise while a disk or its server fails (``may_pass``).
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from megasdc.common.errors import StorageError

TEMPORARY_PREFIX = ".tmp_"
"""Prefix of names that are not final yet; files that a killed process has left are found by it."""
REPLACED_PREFIX = f"{TEMPORARY_PREFIX}replaced_"
"""Prefix of the name of a folder that ``commit_folder`` has moved aside."""
_NAME_CHARACTERS = 150  # a name may have 255 bytes
_UNFINISHED = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}.+\.[0-9a-f]{{32}}", re.DOTALL)
"""Pattern of the temporary names that ``replacing`` gives."""


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Context with a file to write that replaces ``path`` at its end; after an exception nothing has changed.

    Content and name are on the disk afterwards. Readers see all of the old content or all of the new.

    Args:
        path: path of the file; its folder exists.
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
    """Remove files that killed processes have left in a folder in the middle of ``replacing``; errors are ignored.

    Args:
        folder: the folder, which need not exist.
        older_than_s: least age in seconds since the last write; a younger file may still be being written, on any host.
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
    """Value of a JSON text; ValueError if it is invalid or nested too deeply (``json``: RecursionError)."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def append_bounded(path: Path, text: str, largest: int) -> None:
    """Append whole lines to a file; if it has more than ``largest`` bytes, its older half is removed first.

    An incomplete last line, left by a killed process, is ended first.
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
    """Rename a file or a folder, and wait until the new name is on the disk and the old one is gone.

    Raises:
        OSError: the rename failed; or it was done, but may not have reached the disk.
    """
    os.rename(source, target)
    for folder in dict.fromkeys((target.parent, source.parent)):
        sync_path(folder)


def commit_folder(temporary: Path, final: Path) -> None:
    """Rename a written folder to its final name.

    An existing folder of that name is moved aside first, under ``REPLACED_PREFIX``, and deleted afterwards. If it is a
    link, only the link is replaced, not its target.

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


T = TypeVar("T")
Say = Callable[[str], None]

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
FAILS = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT})
"""Error numbers of a write while a disk, or the server of a file system, fails, perhaps for a while."""
WAIT_S = 900.0
"""Default of ``megasdc.logging.wait_for_room_s``."""
END_S = 10.0
"""Seconds that a process waits for room after it has failed or was asked to end, since others wait for it."""
RETRY_S = 1.0
MAX_KEPT_BYTES = 64 << 20
PROBE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 16


def lacks_room(error: BaseException | None) -> bool:
    """Whether an error, or a cause of it, is that of a disk without room."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        error = error.__cause__
    return False


def may_pass(error: BaseException) -> bool:
    """Whether an error may pass, so that data can wait in memory: no room, or a disk that fails."""
    return isinstance(error, OSError) and error.errno in NO_ROOM | FAILS


def probe(folder: Path | str) -> None:
    """Test whether a folder can be written, with a file that is removed; does nothing if the folder does not exist.

    Raises:
        OSError: the folder cannot be written.
    """
    with contextlib.suppress(FileNotFoundError), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def print_on_stderr(text: str) -> None:
    """Print a line to standard error."""
    print(f"megasdc: {text}", file=sys.stderr, flush=True)


class _Process:
    """Writes of this process that wait for room.

    Attributes:
        limit_s: seconds that a write waits at most.
        since: time on the monotonic clock at which each waiting write began to wait, by path or name.
        files: text of each small file that waits, by path.
        lines: all open files of lines.
        lost: number of lines that were neither written nor kept.
        retry_at: time on the monotonic clock of the next attempt to write the waiting files.
        hurries_since: start of the first of several writes that may wait only briefly (``at_most_s``), on the monotonic
            clock; None: there is room.
        asked: function that returns whether this process is asked to end.
        asked_since: time on the monotonic clock at which that was first seen; None: it is not asked to end.
    """

    def __init__(self) -> None:
        self.limit_s = WAIT_S
        self.since: dict[str, float] = {}
        self.files: dict[Path, str] = {}
        self.lines: weakref.WeakSet[LineFile] = weakref.WeakSet()
        self.lost = 0
        self.retry_at = 0.0
        self.hurries_since: float | None = None
        self.asked: Callable[[], object] = bool
        self.asked_since: float | None = None
        self.lock = threading.RLock()

    def mark(self, what: Path | str, waits: bool) -> None:
        """Record that a write waits, or no longer waits; ``what``: its path or name."""
        with self.lock:
            if waits:
                self.since.setdefault(str(what), time.monotonic())
            else:
                self.since.pop(str(what), None)


_process = _Process()


def set_limit(limit_s: float) -> None:
    """Set the number of seconds that this process waits for room at most; 0: it does not wait."""
    _process.limit_s = limit_s


def limit_s() -> float:
    """Number of seconds that this process waits for room at most."""
    return _process.limit_s


def end_waits_when(asked: Callable[[], object]) -> None:
    """Set the function that returns whether this process is asked to end, so that waits end after ``END_S``."""
    _process.asked, _process.asked_since = asked, None


def is_asked_to_end() -> bool:
    """Whether this process is asked to end."""
    return bool(_process.asked())


def _asked_for_s() -> float:
    """Seconds since it was first seen that this process is asked to end; 0.0: it is not."""
    if not is_asked_to_end():
        _process.asked_since = None
        return 0.0
    if _process.asked_since is None:
        _process.asked_since = time.monotonic()
    return time.monotonic() - _process.asked_since


def waiting_files() -> list[str]:
    """Paths and names of this process's writes that wait for room, sorted."""
    return sorted(_process.since)


def lost_lines() -> int:
    """Number of lines that this process could neither write nor keep."""
    return _process.lost


def waiting_s() -> float:
    """Seconds for which the oldest waiting write of this process has waited, after a retry; 0.0: nothing waits."""
    if not _process.since:
        return 0.0
    if time.monotonic() >= _process.retry_at:
        retry()
    return max((time.monotonic() - since for since in _process.since.values()), default=0.0)


def retry() -> None:
    """Try to write the lines and small files that wait.

    Raises:
        OSError: one of them cannot be written for another reason than a lack of room or a disk that fails.
    """
    with _process.lock:
        _process.retry_at = time.monotonic() + RETRY_S
        for lines in list(_process.lines):
            lines.flush()
        for path in list(_process.files):
            text = _process.files.pop(path)
            write_when_room(path, text)


def write_whole(path: Path, text: str) -> None:
    """Replace a small file durably; its folder is created if absent.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text)


def write_when_room(path: Path, text: str) -> bool:
    """Replace a small file durably, now or once there is room; returns whether it was written now.

    Without room, or while the disk fails, the text is kept and written later; of several writes of one file only the
    last. Its folder is created if absent.

    Raises:
        OSError: it cannot be written for another reason.
    """
    with _process.lock:
        _process.files.pop(path, None)
        try:
            write_whole(path, text)
        except OSError as error:
            if not may_pass(error) or not _process.limit_s:
                raise
            _process.files[path] = text
            _record_waiting(path, error)
            return False
        _process.mark(path, waits=False)
        return True


def _record_waiting(path: Path, error: OSError) -> None:
    """Record that a file's content waits; a disk that fails is reported once, since its folder does not show it."""
    if error.errno in FAILS and str(path) not in _process.since:
        print_on_stderr(
            f"{path} cannot be written ({error.strerror}): what belongs there is kept in memory, and written once that "
            f"is possible, for up to {_process.limit_s:g} s"
        )
    _process.mark(path, waits=True)


def wait_for_room(
    action: Callable[[], T],
    what: Path | str,
    say: Say = print_on_stderr,
    *,
    at_most_s: float | None = None,
    passes: Callable[[BaseException], bool] = lacks_room,
) -> T:
    """Call a function that writes, and repeat it each second while there is no room.

    Args:
        action: the function that writes.
        what: path or name of the written file, for messages; waiting time counts from its first failure for lack of
            room in this process.
        say: function that gets one message at the start and one at the end of a wait.
        at_most_s: seconds to wait at most, for several writes in succession together; None: ``limit_s``.
        passes: function that returns whether an error may pass, so that it is waited for.

    Returns:
        The result of ``action``.

    Raises:
        OSError, MegasdcError: the error of ``action``, if it may not pass or the time is over: the limit, or
            ``END_S`` after this process was asked to end.
    """
    limit, begins = _process.limit_s if at_most_s is None else min(at_most_s, _process.limit_s), True
    hurries_since = _process.hurries_since or time.monotonic()
    since = _process.since.get(str(what), time.monotonic())
    while True:
        try:
            result = action()
        except Exception as error:
            waited_s = time.monotonic() - (since if at_most_s is None else hurries_since)
            is_over = waited_s >= limit or _asked_for_s() >= END_S
            if not passes(error) or is_over:
                if at_most_s is not None or not passes(error):  # nobody writes it any more
                    _process.mark(what, waits=False)
                raise
            _process.mark(what, waits=True)
            if at_most_s is not None:
                _process.hurries_since = hurries_since
            if begins:
                say(f"there is no room for {what} ({error}): waiting up to {limit:g} s")
            begins = False
            time.sleep(RETRY_S)
        else:
            if not begins:
                say(f"there is room for {what} again, after {time.monotonic() - since:.0f} s")
            _process.mark(what, waits=False)
            _process.hurries_since = None
            return result


def need_room(action: Callable[[], T], what: Path | str, say: Say = print_on_stderr) -> T:
    """``wait_for_room`` for a write that this process cannot do without.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        return wait_for_room(action, what, say)
    except OSError as error:
        text = f"{what} cannot be written: {error.strerror or error}"
        raise StorageError(text, no_room=lacks_room(error)) from error


def finish(say: Say = print_on_stderr) -> None:
    """Try to write the small files that wait, for ``END_S``; those that still have no room are lost and reported."""
    end = (_process.hurries_since or time.monotonic()) + END_S
    while _process.files and time.monotonic() < end:
        retry()
        time.sleep(RETRY_S if _process.files else 0.0)
    for path in list(_process.files):
        del _process.files[path]
        _process.mark(path, waits=False)
        say(f"{path} could not be written and is lost: there was no room")


class RoomProbe:
    """Periodic test of whether a folder has room.

    Args:
        folder: the folder.
        say: function that gets a message when the folder has no room, and when it has room again.
        every_s: least number of seconds between two tests.

    Attributes:
        seen: whether the folder has ever had no room.
    """

    def __init__(self, folder: Path, say: Say, every_s: float = 5.0) -> None:
        self._folder, self._say, self._every_s = folder, say, every_s
        self._look_at, self._since = 0.0, 0.0
        self.seen = False

    def has_room(self) -> bool:
        """Whether the folder had room at the last test, which is repeated if it is older than ``every_s``."""
        now = time.monotonic()
        if now < self._look_at:
            return not self._since
        self._look_at = now + self._every_s
        problem = ""
        try:
            probe(self._folder)
        except OSError as error:
            problem = str(error.strerror) if lacks_room(error) else ""
        if problem and not self._since:
            self._since, self.seen = now, True
            self._say(f"{self._folder} has no room ({problem}): the run waits up to {_process.limit_s:g} s for some")
        elif not problem and self._since:
            self._say(f"{self._folder} has room again, after {now - self._since:.0f} s")
            self._since = 0.0
        _process.mark(self._folder, waits=bool(problem))
        return not problem

    def need(self) -> None:
        """Test the folder, for a process that can do nothing without room.

        Raises:
            StorageError: the folder has had no room for ``limit_s``.
        """
        if not self.has_room() and (waited_s := time.monotonic() - self._since) >= _process.limit_s:
            raise StorageError(
                f"{self._folder} has had no room for {waited_s:.0f} s; megasdc.logging.wait_for_room_s is "
                f"{_process.limit_s:g}. What to do: free space, then start it again",
                no_room=True,
            )


class LineFile(io.TextIOBase):
    """A file to which whole lines are appended; lines without room are kept in memory, and written before later ones.

    An incomplete last line, left by a killed process, is cut off first, so that the next line does not become part of
    it. Its folder is created if absent.

    Args:
        path: path of the file; created if absent.
        binary: whether it holds binary records instead of lines; the file is then written anew.

    Attributes:
        lost: number of lines that were dropped because ``MAX_KEPT_BYTES`` were waiting already.
        is_new: whether nothing was ever written to it.

    Raises:
        OSError: it cannot be opened, also after waiting for room.
    """

    def __init__(self, path: Path | str, *, binary: bool = False) -> None:
        self.path, self.lost = Path(path), 0
        self.is_new = True
        self._kept = bytearray()
        self._binary, self._has_failed, self._is_in_line = binary, False, False
        self._file = wait_for_room(lambda: self._open(binary), self.path)
        _process.lines.add(self)

    def _open(self, binary: bool) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if binary:
            return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        _cut_incomplete(self.path)
        self.is_new = not self.path.exists() or not self.path.stat().st_size
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, text: str) -> int:
        """Append text, and write what ends with a line."""
        self.add(text.encode())
        if text.endswith("\n") or len(self._kept) > _BLOCK_BYTES:
            self.flush()
        return len(text)

    def add(self, data: bytes, *, follows: bool = False) -> None:
        """Append to the buffer; ``follows``: the data are useless without those before, so drop them if some are lost.

        ``flush`` writes the buffer.
        """
        with _process.lock:
            is_too_much = str(self.path) in _process.since and len(self._kept) + len(data) > MAX_KEPT_BYTES
            if is_too_much or (follows and self.lost):
                self.lost += 1
                _process.lost += 1
                return
            self._kept += data
            self.is_new = False

    def flush(self) -> None:
        """Write the buffer, as far as there is room and the disk does not fail.

        Raises:
            OSError: it cannot be written for another reason; the error names the file.
        """
        try:
            self._write()
        except OSError as error:
            if not may_pass(error) or not _process.limit_s:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            _record_waiting(self.path, error)

    def _write(self) -> None:
        if self.closed:
            return
        with _process.lock:
            if self._has_failed and not self._binary:
                self._open_again()
            while self._kept:
                try:
                    count = os.write(self._file, self._kept)
                except OSError as error:
                    self._has_failed = error.errno in FAILS
                    raise
                self._is_in_line = self._kept[count - 1 : count] != b"\n"
                del self._kept[:count]
            _process.mark(self.path, waits=False)

    def _open_again(self) -> None:
        """Open the file again, since a descriptor of a disk that has failed may never work again.

        A part of a line whose write failed is cut off first.
        """
        if not self._is_in_line:
            _cut_incomplete(self.path)
        number = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(number, self._file)
        os.close(number)
        self._has_failed = False

    def close(self) -> None:
        """Write the rest of the buffer, waiting for up to ``END_S``, and close; lines that are lost are reported."""
        if self.closed:
            return
        try:
            wait_for_room(self._write, self.path, at_most_s=END_S, passes=may_pass)
        except OSError as error:
            kept = bytes(self._kept).count(b"\n") + self.lost
            print_on_stderr(f"{self.path}: {kept} lines could not be written and are lost: {error.strerror}")
            if not may_pass(error):
                raise
        finally:
            self._kept.clear()
            _process.mark(self.path, waits=False)
            super().close()
            os.close(self._file)

    def fileno(self) -> int:
        """File descriptor of the open file."""
        return self._file


def _cut_incomplete(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "rb+") as file:
        end, last = file.seek(0, os.SEEK_END), -1
        whole = end
        while end and last < 0:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            last = file.read(end - start).rfind(b"\n")
            end = start + last + 1
        if end != whole:
            file.truncate(end)


@contextlib.contextmanager
def appended(path: Path) -> Iterator[LineFile]:
    """Context with a ``LineFile`` for a few lines."""
    file = LineFile(path)
    try:
        yield file
    finally:
        file.close()
