"""Writer process of a rank, seen from the rank: tasks, answers, and layout of the files that it seals; no torch.

A file of ``torch.save`` is laid out before its tensors are there, which are filled in later, in any order. It is a zip
archive of uncompressed members: a pickle, a few notes on the format, and the bytes of each tensor, which begin at
multiples of 64 so that they can be mapped. Everything but the checksums of the tensors is known beforehand. ``seal``
completes the file. Source: the zip format, PKWARE's APPNOTE.TXT 6.3; the members are those of torch 2.13.

The process runs ``megasdc.checkpoint.writer_main``; the rank never waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megasdc.checkpoint.files import Fence, delete_unheld
from megasdc.checkpoint.records import write_record
from megasdc.common.durable import commit_folder, write_durably

_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END64, _LOCATOR, _END = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI"), struct.Struct("<4s4H2IH")
_WIDE = struct.Struct("<2H2Q")
"""Extra field with both sizes in 64 bits."""
_MARK, _MARK16 = 0xFFFFFFFF, 0xFFFF
"""Placeholders for a number that is in an extra field or in the 64-bit end."""
_ALIGNMENT = 64
_PADDING = struct.Struct("<2sH")
_OLD_VERSION, _WIDE_VERSION = 20, 45
_DATE = 0x21
"""MS-DOS date of each member: the first of January 1980, as torch writes."""


@dataclass(frozen=True)
class Member:
    """One member of the archive.

    Attributes:
        name: name of the member, after the archive's own name and a slash.
        header_at: offset of its local header in the file, bytes.
        offset: offset of its first content byte in the file.
        size_bytes: size of its content.
        content: content of the pickle or of a note; None: a tensor's bytes, filled in later.
    """

    name: str
    header_at: int
    offset: int
    size_bytes: int
    content: bytes | None


@dataclass(frozen=True)
class FileLayout:
    """Offsets of all parts of a file.

    Attributes:
        members: members of the archive, in order of offset.
        directory_at: offset of the archive's directory, bytes.
        size_bytes: size of the whole file.
    """

    members: tuple[Member, ...]
    directory_at: int
    size_bytes: int

    @property
    def tensors(self) -> tuple[Member, ...]:
        """Members with the bytes of tensors, in the order in which the tensors were given."""
        return tuple(one for one in self.members if one.content is None)

    @property
    def contents(self) -> list[bytes]:
        """Contents of the pickle and the notes."""
        return [one.content for one in self.members if one.content is not None]

    def without_contents(self) -> FileLayout:
        """The same layout without these contents, for a file that has them already."""
        members = (replace(one, content=None if one.content is None else b"") for one in self.members)
        return replace(self, members=tuple(members))

    def write_contents(self, file: memoryview) -> None:
        """Write the pickle and the notes.

        Args:
            file: memory of the file, [size_bytes], writable.
        """
        for member in self.members:
            if member.content is not None:
                file[member.offset : member.offset + member.size_bytes] = member.content


def lay_out(archive: str, pickled: bytes, tensor_bytes: Sequence[int]) -> FileLayout:
    """Layout of a file with a pickle and tensors.

    Args:
        archive: first part of all members' names: the name of the file without its ending.
        pickled: the pickle, which refers to the tensors by their index.
        tensor_bytes: bytes of each tensor, [tensors].
    """
    contents: list[tuple[str, bytes | int]] = [
        ("data.pkl", pickled),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
        *((f"data/{index}", size) for index, size in enumerate(tensor_bytes)),
        ("version", b"3\n"),
    ]
    members, end = [], 0
    for name, content in contents:
        full = f"{archive}/{name}"
        known = content if isinstance(content, bytes) else None
        size = content if isinstance(content, int) else len(content)
        head = end + _LOCAL.size + len(full.encode()) + _wide_bytes(size) + _PADDING.size
        offset = -(-head // _ALIGNMENT) * _ALIGNMENT
        members.append(Member(full, end, offset, size, known))
        end = offset + size
    directory = sum(len(_central_header(member, 0)) for member in members)
    return FileLayout(tuple(members), end, end + directory + len(_end(len(members), end, directory)))


def seal(file: memoryview, layout: FileLayout) -> None:
    """Write the headers of all members and the archive's directory, once all contents are there.

    Args:
        file: memory of the file, [layout.size_bytes], writable.
    """
    checksums = [zlib.crc32(file[one.offset : one.offset + one.size_bytes]) for one in layout.members]
    for member, checksum in zip(layout.members, checksums, strict=True):
        file[member.header_at : member.offset] = local_header(member, checksum)
    file[layout.directory_at :] = directory(layout, checksums)


def directory(layout: FileLayout, checksums: Sequence[int]) -> bytes:
    """The archive's directory; ``checksums``: CRC-32 of the content of each member, in the order of the layout."""
    headers = b"".join(map(_central_header, layout.members, checksums))
    return headers + _end(len(layout.members), layout.directory_at, len(headers))


def _is_wide(number: int) -> bool:
    return number >= _MARK


def _wide_bytes(size: int) -> int:
    return _WIDE.size if _is_wide(size) else 0


def local_header(member: Member, checksum: int) -> bytes:
    """What stands in the file before the content of a member; ``checksum``: CRC-32 of the content."""
    name, wide = member.name.encode(), _is_wide(member.size_bytes)
    extra = _WIDE.pack(1, 16, member.size_bytes, member.size_bytes) if wide else b""
    filling = member.offset - member.header_at - _LOCAL.size - len(name) - len(extra) - _PADDING.size
    extra += _PADDING.pack(b"FB", filling) + b"Z" * filling
    version, size = (_WIDE_VERSION, _MARK) if wide else (_OLD_VERSION, member.size_bytes)
    return _LOCAL.pack(b"PK\3\4", version, 0, 0, 0, _DATE, checksum, size, size, len(name), len(extra)) + name + extra


def _central_header(member: Member, checksum: int) -> bytes:
    name, extra = member.name.encode(), b""
    size, header_at = member.size_bytes, member.header_at
    if _is_wide(size) or _is_wide(header_at):
        extra = struct.pack("<2H3Q", 1, 24, size, size, header_at)
        size = header_at = _MARK
    version = _WIDE_VERSION if extra else _OLD_VERSION
    numbers = (version, version, 0, 0, 0, _DATE, checksum, size, size, len(name), len(extra), 0, 0, 0, 0, header_at)
    return _CENTRAL.pack(b"PK\1\2", *numbers) + name + extra


def _end(count: int, start: int, size: int) -> bytes:
    """End records of the directory, with 64-bit and with 32-bit numbers."""
    wide = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
    locator = _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    counts = min(count, _MARK16)
    return wide + locator + _END.pack(b"PK\5\6", 0, 0, counts, counts, min(size, _MARK), min(start, _MARK), 0)


@dataclass(frozen=True)
class TakenFile:
    """A file of a snapshot that is filled but not sealed.

    Attributes:
        name: name in the checkpoint's folder.
        path: path by which other processes can open it.
        layout: offsets of its parts, without contents.
        checksums: checksum of each tensor before it was copied, in the order of the layout.
        algorithm: name of the checksums' algorithm.
        element_bytes: bytes of an element of each tensor.
        contents: XXH3-64 of the pickle and of each note, in the order of the layout.
        described: for a layer's file, data type and shape of each tensor, else None.
        finite: whether its tensors held neither NaN nor Inf.
    """

    name: str
    path: Path
    layout: FileLayout
    checksums: list[int]
    algorithm: str
    element_bytes: list[int]
    contents: list[int]
    described: dict[str, str] | None
    finite: bool


@dataclass(frozen=True)
class StoreTask:
    """Task: seal a snapshot's files, write them, and compare their content with the checksums.

    Attributes:
        files: the snapshot's files; of a rank that writes itself ``megasdc.checkpoint.snapshot.CapturedFile``.
        target: folder to write them into.
        in_place: whether they lie in that folder already, as slots in memory do.
        texts: content of further files by name, as JSON in one line; they are written with an indent.
        held: fields of a memory slot's record without its files; None: it is no such slot.
    """

    files: Sequence[Any]
    target: Path
    in_place: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    held: dict[str, Any] | None = None


@dataclass(frozen=True)
class StoredFile:
    """A file that was stored.

    Attributes:
        described: for a layer's file, data type and shape of each tensor, else None.
        content: ``megasdc.checkpoint.manifest.Content`` of a file on the disk; None for a file in memory.
    """

    name: str
    size_bytes: int
    xxh3_128: str
    described: dict[str, str] | None
    content: Any


@dataclass(frozen=True)
class Act:
    """Task: write small files, rename a folder and delete old checkpoints, in this order.

    Attributes:
        contents: texts and records of the files to replace, by path.
        rename: temporary and final path of a folder; None: none is renamed.
        due: function that returns the folders of the checkpoints to delete, by step; one that cannot be deleted is
            reported, and the others are deleted.
        fence: claim on the folder, which is checked first; None: no check.
    """

    contents: Mapping[Path, Any] = field(default_factory=dict)
    rename: tuple[Path, Path] | None = None
    due: Callable[[], Mapping[int, Path]] = dict
    fence: Fence | None = None


@dataclass(frozen=True)
class Listen:
    """Task: receive the slots of other hosts' ranks, as ``megasdc.checkpoint.host_memory.PartnerReplicas``."""

    folder: Path
    address: str


@dataclass(frozen=True)
class Join:
    """Task: send each further memory slot to a partner at an address and port, with its secret."""

    address: str
    port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class TaskResult:
    """Result of a task.

    Attributes:
        problem: reason why the task failed; empty: it succeeded.
        is_storage: whether a disk caused the failure.
        no_room: whether that disk had no room.
        stored: files of a ``StoreTask``.
        deleted: steps whose checkpoints were deleted.
        failed: a message for each checkpoint that could not be deleted.
        took_s: seconds that the task took.
        port, token: port and secret of a ``Listen``.
    """

    problem: str = ""
    is_storage: bool = False
    no_room: bool = False
    stored: list[StoredFile] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    took_s: float = 0.0
    port: int = 0
    token: bytes = field(default=b"", repr=False)


def write_texts(task: StoreTask) -> None:
    """Write a task's further files."""
    for name, text in task.texts.items():
        write_durably(task.target / name, json.dumps(json.loads(text), indent=1) + "\n")


def describe_stored(path: Path, described: dict[str, str] | None) -> StoredFile:
    """Entry of a written file for the manifest; the file is read again for its digests."""
    from megasdc.checkpoint.allowlist import check_pickle
    from megasdc.checkpoint.manifest import digest_file

    if path.suffix == ".pt":
        check_pickle(path)
    found = digest_file(path)
    return StoredFile(path.name, found.size_bytes, found.xxh3_128, described, found.content)


def act(task: Act) -> TaskResult:
    """Write small files, rename a folder and delete old checkpoints.

    Raises:
        OSError: a file cannot be written, or the folder cannot be renamed; the later changes were not made.
        FencedError: another launch has taken the folder; nothing was done.
    """
    due = task.due()  # before the check: nothing long lies after it
    if task.fence is not None:
        task.fence.check()
    for path, content in task.contents.items():
        write_durably(path, content) if isinstance(content, str) else write_record(path, content)
    if task.rename is not None:
        commit_folder(*task.rename)
    problems = {step: delete_unheld(folder) for step, folder in due.items()}
    deleted = [step for step, problem in problems.items() if problem is None]
    return TaskResult(deleted=deleted, failed=[problem for problem in problems.values() if problem is not None])


def error_result(error: Exception) -> TaskResult:
    """Result of a task that an exception has ended."""
    from megasdc.checkpoint.ranks import describe_error

    doing = f"write {error.filename}" if isinstance(error, OSError) and error.filename else "write the checkpoint"
    problem = describe_error(error, doing)
    text = problem.text
    if isinstance(error, FileNotFoundError):
        text += "; where hosts have folders of their own, set megasdc.checkpoint.storage to node_local"
    return TaskResult(text, problem.storage, problem.no_room)


Task = StoreTask | Act | Listen | Join
POLL_S = 0.01
_MODULE = "megasdc.checkpoint.writer_main"


class WriterProcess:
    """The writer of a rank: a process of its own, since a thread would keep the rank's Python from running.

    Args:
        describes: whether it describes the content of the files that it writes, for which it loads torch at its start.
    """

    def __init__(self, *, describes: bool) -> None:
        self._describes = describes
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()

    @property
    def pid(self) -> int | None:
        """Process id of the writer; None: it was not started."""
        return None if self._process is None else self._process.pid

    @property
    def lives(self) -> bool:
        """Whether the writer runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the writer unless it runs.

        Raises:
            OSError: it cannot be started.
        """
        if not self.lives:
            self.close()
            self._start()

    def send(self, task: Task) -> None:
        """Give the writer a task, whose result ``poll_result`` returns; it is started first if it does not run.

        Raises:
            OSError: it cannot be started.
        """
        self.start()
        self._tasks.put(task)

    def hurry(self) -> None:
        """Raise the writer from idle to normal scheduling priority, because something waits for it."""
        if self._process is not None:
            _schedule(self._process.pid, os.SCHED_OTHER)

    def _start(self) -> None:
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", _MODULE, str(there.fileno()), str(os.getpid()), str(int(self._describes))]
            environment = {**os.environ, "DS_ACCELERATOR": "cpu"}  # it uses no device
            self._process = subprocess.Popen(
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
            _schedule(self._process.pid, os.SCHED_IDLE)  # from here: the writer itself might do so after ``hurry``
        self._pipe, self._tasks = Connection(here.detach()), SimpleQueue()
        self._sender = threading.Thread(target=_pass_on, args=(self._tasks, self._pipe), name="writer", daemon=True)
        self._sender.start()

    def run_task(self, task: Task) -> TaskResult:
        """Give the writer a short task and wait for its result.

        Raises:
            OSError: it cannot be started.
        """
        self.send(task)
        while (found := self.poll_result()) is None:
            time.sleep(POLL_S)
        return found

    def poll_result(self) -> TaskResult | None:
        """Result of the oldest task without an answer; None: it is not done."""
        if self._process is None or self._pipe is None:
            return TaskResult("its writer does not run", is_storage=True)
        try:
            if self._pipe.poll():
                found: TaskResult = self._pipe.recv()
                return found
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return TaskResult(f"its writer (process {self._process.pid}) {how}", is_storage=True)
        return None

    def close(self) -> None:
        """Kill the writer, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._tasks.put(None)
            self._sender.join()
            self._pipe.close()
        self._process = self._pipe = None


def _schedule(pid: int, policy: int) -> None:
    with contextlib.suppress(OSError):  # it has ended, or the system does not allow it
        os.sched_setscheduler(pid, policy, os.sched_param(0))


def _pass_on(tasks: SimpleQueue[Task | None], pipe: Connection) -> None:
    """Send tasks in a thread, since a rank would have to wait while the writer is busy and the pipe is full."""
    while (task := tasks.get()) is not None:
        try:
            pipe.send(task)
        except OSError:  # it has ended, which the answer tells
            return
