"""What the memory of a host holds of a run: slots of its own ranks, and copies of those of a partner's; no torch.

A slot is a folder in shared memory: the files that the rank saves, laid out as on the disk, and ``held.json`` with
their digests, which is written last. A slot without it, or whose digests do not match, holds nothing. Whether a step is
whole is not written anywhere: a restart looks whether every rank's files are found somewhere.

A slot is copied to the memory of another host from writer to writer over TCP. A writer listens on one address of its
host and lets in whoever knows its secret (``megasdc.common.wire``), which went to the other ranks through
``torch.distributed``. A slot's record comes first, which names each file with its size and digest, then the files; what
arrives is compared with the record, and counts once all of it is right. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets
import shutil
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megasdc.checkpoint.records import (
    Count,
    Inside,
    Record,
    Time,
    Xxh3,
    read_record,
    read_text,
    record_text,
    write_record,
)
from megasdc.common.durable import write_durably
from megasdc.common.errors import CheckpointError
from megasdc.common.host import is_own_folder, make_own_folder, own_folders, own_prefix, read_own_json, shared_folder
from megasdc.common.wire import GONE, SECRET_BYTES, Door, connect
from megasdc.parallel.dims import ParallelDims

logger = logging.getLogger(__name__)

HELD_FILE = "held.json"
LINE_FILE = "line.json"
GUESTS = "guests"
"""Folder of the slots of other hosts' ranks."""
OWNER_FILE = "owner"
RESTORE = "restore"
"""Folder in which a restart puts the files of a step together."""
SLOT_FORMAT_VERSION = 2
LEAST_S = 600.0
"""A folder that nobody uses is removed by a later run once it is so old."""
_LOOK_S = 1.0
_APART = "~"
"""Before the random part of a name; no host's name has it."""


class HeldFile(Record):
    """One file of a slot; ``tensors``: see ``megasdc.checkpoint.manifest.FileRecord``."""

    name: Inside
    size_bytes: Count
    xxh3_128: Xxh3
    tensors: dict[str, str] | None


class SlotManifest(Record):
    """Content of ``held.json``.

    Attributes:
        run: id of the run.
        start: number of the start of the run that made it, the first is 1.
        step: optimizer step, first is 1.
        time: when the state was taken, in seconds since the epoch.
        host: where the rank ran.
        layout: tensor, pipeline, data.
        engine: see ``megasdc.checkpoint.save.describe_engine``.
        versions: see ``megasdc.checkpoint.manifest.installed_versions``.
        files: in order of name.
        finite_step: see ``megasdc.checkpoint.manifest.KnownState``.
    """

    format_version: int
    run: str
    start: Count
    step: Count
    time: Time
    rank: Count
    host: str
    layout: list[int]
    engine: dict[str, Any]
    versions: dict[str, str]
    files: list[HeldFile]
    finite_step: Count | None = None


class Lineage(Record):
    """Content of ``line.json``: what counts of what hosts hold, as the newest start that used a host knows it.

    A host that a start did without may hold steps that it took again, or that were wrong: those do not count when the
    host comes back.

    Attributes:
        start: number of that start.
        from_start, from_step: start and step of the snapshot that it went on from; 0: it went on from none.
        verified: last step of that line after which an audit has agreed; 0: of none.
        from_counts: whether ``verified`` says something of the snapshot that the start went on from: it was verified
            before, or the hosts that made it are all in the start.
    """

    format_version: int = SLOT_FORMAT_VERSION
    start: Count = 0
    from_start: Count = 0
    from_step: Count = 0
    verified: Count = 0
    from_counts: bool = True

    def has(self, record: SlotManifest) -> bool:
        """Whether a slot's step is of this line: made by its start, or what that went on from."""
        return record.start >= self.start or (record.start, record.step) == (self.from_start, self.from_step)

    def verifies(self, record: SlotManifest) -> bool:
        """Whether an audit has agreed after a slot's step, on the hosts that made it."""
        return self.has(record) and record.step <= self.verified and (record.start >= self.start or self.from_counts)


@dataclass(frozen=True)
class MemorySlot:
    """A slot that holds a step.

    Attributes:
        folder: of the slot, on this host.
        is_guest: whether the rank ran on another host.
    """

    folder: Path
    record: SlotManifest
    is_guest: bool


def memory_folder(run: str | None) -> Path:
    """Folder of a run in the shared memory of this host; ``run``: its id, which every start of a run has.

    Under SLURM it is that of a start of the job: what an earlier one has left is not the job's own. Where another user
    has taken its name, the folder has a random part behind it, and is found by its owner, also once the name is free
    again; before ``claim`` there is none, and each call has another name for it.
    """
    assert run is not None, "the start was counted"
    job = f"job{number}-" if (number := os.environ.get("SLURM_JOB_ID")) else ""
    if job and (restarts := os.environ.get("SLURM_RESTART_COUNT", "0")) != "0":
        job = f"job{number}.{restarts}-"
    folder = shared_folder() / f"{own_prefix()}memory-{run}-{job}{socket.gethostname()}"
    if is_own_folder(folder):
        return folder
    if (own := min(own_folders(f"{folder.name}{_APART}"), default=None)) is not None:
        return own
    return _beside(folder) if os.path.lexists(folder) else folder


def _beside(folder: Path) -> Path:
    """A name that no other user can guess."""
    return folder.with_name(f"{folder.name}{_APART}{secrets.token_hex(16)}")


def rank_folder(folder: Path, rank: int) -> Path:
    """Folder of a rank's slots."""
    return folder / f"rank_{rank:05d}"


def make_within(folder: Path, inner: Path) -> None:
    """Make a folder within that of a run, which must be this user's alone; it is made where it has been removed.

    Args:
        inner: at any depth in ``folder``; it may be there already.

    Raises:
        OSError: it cannot be made, or another user has taken the name of ``folder``.
    """
    make_own_folder(folder)  # with ``parents`` it would be one that others may enter, or theirs
    for name in inner.relative_to(folder).parts:
        folder = folder / name
        folder.mkdir(exist_ok=True)


def find_held(folder: Path, run: str | None) -> tuple[list[MemorySlot], list[str]]:
    """All slots of a run that hold a step, and what is wrong with others, a line each."""
    found, problems = [], []
    for path in sorted([*folder.glob(f"rank_*/*/{HELD_FILE}"), *folder.glob(f"{GUESTS}/rank_*/*/{HELD_FILE}")]):
        try:
            record = read_record(path, SlotManifest, SLOT_FORMAT_VERSION)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if record.run == run:
            found.append(MemorySlot(path.parent, record, path.is_relative_to(folder / GUESTS)))
    return found, problems


def forget(folder: Path, stays: Callable[[SlotManifest], bool] = lambda record: False) -> None:
    """Remove what is held of steps that do not stay; a slot that is being filled is not touched.

    Raises:
        OSError: something cannot be removed.
    """
    for path in [*folder.glob(f"rank_*/*/{HELD_FILE}"), *folder.glob(f"{GUESTS}/rank_*/*/{HELD_FILE}")]:
        try:
            if stays(read_record(path, SlotManifest, SLOT_FORMAT_VERSION)):
                continue
        except CheckpointError:
            if not path.exists():  # it is being filled again
                continue
        path.unlink(missing_ok=True)  # first: what is half removed must not count
        shutil.rmtree(path.parent)


@dataclass(frozen=True)
class FolderOwner:
    """Content of ``owner``: the start of a run that uses a folder.

    Attributes:
        start: id of the run and number of the start, joined by a dot.
        pid: of a process on this host that belongs to it.
        linger_s: seconds that the folder stays when its ranks have failed.
    """

    start: str
    pid: int
    linger_s: float


def claim(folder: Path, start: str, linger_s: float) -> Path:
    """Make the folder, and say which start of the run uses it now: the agent of an earlier one leaves it alone then.

    Returns:
        The folder, which ``memory_folder`` gives from now on; it has a name beside that where another user has made one
        of that name meanwhile.

    Raises:
        OSError: shared memory cannot be written.
    """
    try:
        make_own_folder(folder)
    except PermissionError:
        folder = _beside(folder)
        make_own_folder(folder)
    write_durably(folder / OWNER_FILE, json.dumps(asdict(FolderOwner(start, os.getpid(), linger_s))))
    return folder


def owner(folder: Path) -> FolderOwner | None:
    """The start that uses a folder; None: there is no folder, or nobody uses it."""
    try:
        found = FolderOwner(**read_own_json(folder / OWNER_FILE))
    except (OSError, ValueError, TypeError):
        return None
    is_valid = type(found.pid) is int and type(found.linger_s) in (int, float) and isinstance(found.start, str)
    return found if is_valid else None


def linger(folder: Path, start: str) -> None:
    """Wait until another start has taken a folder, or it has stayed for as long as it may; then remove it.

    How long that is may change meanwhile: a supervisor whose run has ended, or does without the host, lets it go.
    """
    since = time.monotonic()
    while (found := owner(folder)) is not None and found.start == start:
        if time.monotonic() >= since + found.linger_s:
            _remove(folder)
            return
        with contextlib.suppress(OSError):
            os.utime(folder / OWNER_FILE)  # that another run sees it is not forgotten
        time.sleep(_LOOK_S)


def remove_forgotten(kept: Path) -> None:
    """Remove this user's folders of runs that are gone, where no agent was left to do so, but for the own one."""
    host = socket.gethostname()
    for folder in own_folders(f"{own_prefix()}memory-"):
        if not folder.name.partition(_APART)[0].endswith(f"-{host}"):
            continue  # hosts may share the folder
        with contextlib.suppress(OSError):
            found = owner(folder)
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
            age_s = time.time() - newest
            may_go = age_s > (LEAST_S if found is None else max(LEAST_S, found.linger_s))
            if folder != kept and may_go and not _lives(found):
                _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder that nobody can take meanwhile: it has another name first."""
    aside = folder.with_name(f"{own_prefix()}removed-{secrets.token_hex(16)}")
    with contextlib.suppress(OSError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _lives(found: FolderOwner | None) -> bool:
    return found is not None and Path(f"/proc/{found.pid}").exists()


def write_line(folder: Path, line: Lineage) -> None:
    """Write what counts from now on.

    Raises:
        OSError: shared memory cannot be written.
    """
    write_record(folder / LINE_FILE, line)


def read_line(folder: Path) -> Lineage:
    """What counts as this host knows it; where nothing is known, all does, and nothing is verified."""
    try:
        return read_record(folder / LINE_FILE, Lineage, SLOT_FORMAT_VERSION)
    except CheckpointError as error:
        if (folder / LINE_FILE).exists():
            logger.warning("memory: %s", error)
        return Lineage()


def mark_verified_up_to(folder: Path, step: int) -> None:
    """Write that an audit has agreed after a step of the start that uses the folder.

    Raises:
        OSError: shared memory cannot be written.
    """
    write_line(folder, read_line(folder).model_copy(update={"verified": step}))


_CONNECT_S = 10.0
_ANSWER_S = 60.0
"""Seconds that a partner may take for a piece of a slot, or to compare the whole, before it counts as lost."""
_LARGEST_RECORD = 64 << 20
_LARGEST_NAME = 64
_HEAD = struct.Struct("<II")
"""Bytes of the slot's name, and of its record."""
_RIGHT, _WRONG = b"\1", b"\0"
_PIECE = 1 << 22


def partner_of(dims: ParallelDims, nodes: Mapping[str, Sequence[int]], rank: int) -> int | None:
    """The rank whose host keeps copies for a rank; None: there is only one host.

    It is on another host, where there is one outside the hosts of the rank's replica, which are excluded together where
    it is not clear which of them is wrong.

    Args:
        nodes: ranks of each host, in an order that is the same everywhere.
    """
    names = list(nodes)
    own = next(name for name in names if rank in nodes[name])
    replica = [name for name in names if any(_replica(dims, one) == _replica(dims, rank) for one in nodes[name])]
    outside = [name for name in _after(names, replica[0]) if name not in replica]
    if outside:  # the hosts of a replica take different ones
        host = outside[replica.index(own) % len(outside)]
    elif len(names) > 1:
        host = _after(names, own)[0]
    else:
        return None
    return nodes[host][list(nodes[own]).index(rank) % len(nodes[host])]


def _after(names: Sequence[str], name: str) -> list[str]:
    """All others, beginning with the one that follows."""
    start = names.index(name)
    return [*names[start + 1 :], *names[:start]]


def _replica(dims: ParallelDims, rank: int) -> int:
    return ParallelDims(dims.tensor, dims.pipeline, dims.data, rank).dp_rank


class PartnerReplicas:
    """Receives slots of other hosts' ranks, each sender in a thread of its own.

    Args:
        folder: of the run, in shared memory.
        address: of this host, to listen on.

    Raises:
        OSError: the address is not known, or none of this host's.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.token = secrets.token_bytes(SECRET_BYTES)
        self._folder = folder
        self._door = Door(address, self.token, self._serve)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._door.port

    def _serve(self, connection: socket.socket, _hello: object) -> None:
        with contextlib.suppress(OSError, ValueError, CheckpointError):  # the sender notices the closed connection
            while True:
                self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        """Receive a slot.

        Raises:
            OSError: the sender has gone, or memory is full.
            ValueError, CheckpointError: it does not keep to the protocol.
        """
        name_bytes, record_bytes = _HEAD.unpack(_receive(connection, _HEAD.size))
        if name_bytes > _LARGEST_NAME or record_bytes > _LARGEST_RECORD:
            raise ValueError(f"a record of {record_bytes} bytes in a slot whose name has {name_bytes}")
        name, text = (_receive(connection, size).decode() for size in (name_bytes, record_bytes))
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no slot")
        record: SlotManifest = read_text(Path(HELD_FILE), text, SlotManifest, SLOT_FORMAT_VERSION)
        slot = rank_folder(self._folder / GUESTS, record.rank) / name
        make_within(self._folder, slot)
        (slot / HELD_FILE).unlink(missing_ok=True)
        known = {file.name for file in record.files}
        for path in slot.iterdir():
            if path.name not in known:
                path.unlink()
        right = [_take_file(connection, slot / file.name, file) for file in record.files]
        if all(right):
            write_durably(slot / HELD_FILE, text)
        connection.sendall(_RIGHT if all(right) else _WRONG)


def _take_file(connection: socket.socket, path: Path, file: HeldFile) -> bool:
    """Receive a file into memory that is used again; returns whether it is what its digest says."""
    digest = xxhash.xxh3_128()
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b") as opened:
        if file.size_bytes == 0:
            opened.truncate(0)
            return digest.hexdigest() == file.xxh3_128
        os.posix_fallocate(opened.fileno(), 0, file.size_bytes)
        opened.truncate(file.size_bytes)
        with mmap.mmap(opened.fileno(), file.size_bytes) as memory, memoryview(memory) as view:
            place = 0
            while place < file.size_bytes:
                with view[place : place + _PIECE] as piece:
                    got = connection.recv_into(piece)
                    if not got:
                        raise ConnectionError("the sender has gone")
                    digest.update(piece[:got])
                    place += got
    return digest.hexdigest() == file.xxh3_128


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = connection.recv(size - len(content))
        if not piece:
            raise ConnectionError(GONE)
        content += piece
    return bytes(content)


class Partner:
    """The connection to the writer that keeps copies of this rank's slots.

    Raises:
        OSError: it cannot be reached.
    """

    def __init__(self, address: str, port: int, token: bytes) -> None:
        self._connection = connect(address, port, token, {}, _CONNECT_S)
        self._connection.settimeout(_ANSWER_S)

    def send(self, slot: Path, record: SlotManifest) -> None:
        """Send a slot, and wait until the partner has compared it with its record.

        Raises:
            OSError: the partner has gone, or what it got is not right.
        """
        text, name = record_text(record).encode(), slot.name.encode()
        self._connection.sendall(_HEAD.pack(len(name), len(text)) + name + text)
        for file in record.files:
            with open(slot / file.name, "rb") as opened:
                self._connection.sendfile(opened)
        if _receive(self._connection, 1) != _RIGHT:
            raise OSError("what arrived there is not what its digests say")

    def close(self) -> None:
        """End the connection."""
        self._connection.close()
