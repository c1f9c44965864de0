"""Snapshots in the memory of a host: slots of its own ranks, and copies of a partner's slots; no torch.

A slot is a folder in shared memory: the files that the rank saves, laid out as on the disk, and ``held.json`` with
their digests, which is written last. A slot without it, or whose digests do not match, is invalid. No file says whether
a step is complete: a restart checks whether every rank's files are found on some host.

A slot is copied to the memory of another host from writer to writer over TCP. A writer listens on one address of its
host and accepts whoever knows its secret (``megasdc.common.wire``), which was sent to the other ranks through
``torch.distributed``. A slot's record comes first, which names each file with its size and digest, then the files; they
are compared with the record, and the slot is valid once all of them match. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import mmap
import os
import secrets
import shutil
import socket
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
from megasdc.common.wire import SECRET_BYTES, BoundedExchange, Door, WireError, connect
from megasdc.parallel.dims import ParallelDims

logger = logging.getLogger(__name__)

SLOT_MANIFEST_FILE = "held.json"
LINE_FILE = "line.json"
GUESTS = "guests"
"""Name of the folder with the slots of other hosts' ranks."""
OWNER_FILE = "owner"
RESTORE = "restore"
"""Name of the folder in which a restart gathers the files of a step."""
SLOT_FORMAT_VERSION = 2
LEAST_S = 600.0
"""Least age in seconds at which a later run removes a folder that nobody uses."""
_LOOK_S = 1.0
_APART = "~"
"""Separator before the random part of a folder's name; no host's name contains it."""


class SlotFile(Record):
    """One file of a slot; ``tensors``: see ``megasdc.checkpoint.manifest.FileRecord``."""

    name: Inside
    size_bytes: Count
    xxh3_128: Xxh3
    tensors: dict[str, str] | None


class SlotManifest(Record):
    """Content of ``held.json``.

    Attributes:
        run: id of the run.
        start: number of the start of the run that took the snapshot, the first is 1.
        step: optimizer step, first is 1.
        time: time of the snapshot, in seconds since the epoch.
        rank: global rank whose files these are.
        host: name of the host on which that rank ran.
        layout: sizes of the tensor, pipeline and data dimensions, [3].
        engine: see ``megasdc.checkpoint.manifest.describe_engine``.
        versions: see ``megasdc.checkpoint.manifest.installed_versions``.
        files: one record a file, in order of name.
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
    files: list[SlotFile]
    finite_step: Count | None = None


class Lineage(Record):
    """Content of ``line.json``: history of the newest start that used a host, by which its slots are valid or not.

    A host that a start did without may have slots of steps that the start recomputed, or that were wrong: those are
    not used when the host comes back.

    Attributes:
        start: number of the newest start.
        from_start, from_step: start and step of the snapshot that it resumed from; 0: it resumed from none.
        verified: last step of this history after which an audit has agreed; 0: none.
        from_counts: whether ``verified`` covers the snapshot that the start resumed from: it was verified before, or
            all hosts that made it take part in the start.
    """

    format_version: int = SLOT_FORMAT_VERSION
    start: Count = 0
    from_start: Count = 0
    from_step: Count = 0
    verified: Count = 0
    from_counts: bool = True

    def has(self, record: SlotManifest) -> bool:
        """Whether a slot belongs to this history: made by its start or a later one, or the one that it resumed from."""
        return record.start >= self.start or (record.start, record.step) == (self.from_start, self.from_step)

    def verifies(self, record: SlotManifest) -> bool:
        """Whether an audit has agreed after a slot's step, on the hosts that made it."""
        return self.has(record) and record.step <= self.verified and (record.start >= self.start or self.from_counts)


@dataclass(frozen=True)
class MemorySlot:
    """A slot with a snapshot.

    Attributes:
        folder: folder of the slot, on this host.
        record: content of its ``held.json``.
        is_guest: whether it is a copy for a rank of another host.
    """

    folder: Path
    record: SlotManifest
    is_guest: bool


def memory_folder(run: str | None) -> Path:
    """Folder of a run in the shared memory of this host; ``run``: id of the run, the same at all its starts.

    Under SLURM each start of the job has its own folder, so that leftovers of an earlier one are not used. If another
    user has taken the name, the folder's name gets a random suffix, and the folder is found by its owner, even once the
    plain name is free again; until ``claim`` has made it, each call returns another name.
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
    """Path of a folder with a random suffix, which no other user can guess."""
    return folder.with_name(f"{folder.name}{_APART}{secrets.token_hex(16)}")


def rank_folder(folder: Path, rank: int) -> Path:
    """Folder of a rank's slots."""
    return folder / f"rank_{rank:05d}"


def make_within(folder: Path, inner: Path) -> None:
    """Create a folder within that of a run, which must be this user's alone and is created again if it was removed.

    Args:
        folder: folder of the run.
        inner: path at any depth in ``folder``; it may exist.

    Raises:
        OSError: it cannot be created, or another user has taken the name of ``folder``.
    """
    make_own_folder(folder)  # with ``parents`` it would be one that others may enter, or theirs
    for name in inner.relative_to(folder).parts:
        folder = folder / name
        folder.mkdir(exist_ok=True)


def find_slots(folder: Path, run: str | None) -> tuple[list[MemorySlot], list[str]]:
    """All valid slots of a run, and a message for each damaged one."""
    found, problems = [], []
    for path in sorted(
        [*folder.glob(f"rank_*/*/{SLOT_MANIFEST_FILE}"), *folder.glob(f"{GUESTS}/rank_*/*/{SLOT_MANIFEST_FILE}")]
    ):
        try:
            record = read_record(path, SlotManifest, SLOT_FORMAT_VERSION)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if record.run == run:
            found.append(MemorySlot(path.parent, record, path.is_relative_to(folder / GUESTS)))
    return found, problems


def forget(folder: Path, stays: Callable[[SlotManifest], bool] = lambda record: False) -> None:
    """Remove slots, own ones and copies; a slot that is being filled is not touched.

    Args:
        folder: folder of the run.
        stays: function that returns whether a slot with this record is kept.

    Raises:
        OSError: a slot cannot be removed.
    """
    for path in [
        *folder.glob(f"rank_*/*/{SLOT_MANIFEST_FILE}"),
        *folder.glob(f"{GUESTS}/rank_*/*/{SLOT_MANIFEST_FILE}"),
    ]:
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
        pid: id of a process on this host that belongs to the start.
        linger_s: seconds that the folder stays after its ranks have failed.
    """

    start: str
    pid: int
    linger_s: float


def claim(folder: Path, start: str, linger_s: float) -> Path:
    """Create the folder and record the start of the run that uses it, so that an earlier start's agent keeps it.

    Args:
        folder: result of ``memory_folder``.
        start, linger_s: see ``FolderOwner``.

    Returns:
        The folder, which ``memory_folder`` returns from now on; its name has a random suffix if another user has taken
        the plain one meanwhile.

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
    """Keep a folder for ``linger_s`` and then remove it, unless another start takes it before.

    ``linger_s`` is read again each time: a supervisor whose run has ended, or does without the host, sets it lower.
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
    """Remove this user's folders of runs that have ended and that no agent has removed, except the folder ``kept``."""
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
    """Remove a folder; it is renamed first, so that no start can take it meanwhile."""
    aside = folder.with_name(f"{own_prefix()}removed-{secrets.token_hex(16)}")
    with contextlib.suppress(OSError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _lives(found: FolderOwner | None) -> bool:
    return found is not None and Path(f"/proc/{found.pid}").exists()


def write_line(folder: Path, line: Lineage) -> None:
    """Write ``line.json``.

    Raises:
        OSError: shared memory cannot be written.
    """
    write_record(folder / LINE_FILE, line)


def read_line(folder: Path) -> Lineage:
    """Content of this host's ``line.json``; if it is missing or damaged, all slots are valid and none is verified."""
    try:
        return read_record(folder / LINE_FILE, Lineage, SLOT_FORMAT_VERSION)
    except CheckpointError as error:
        if (folder / LINE_FILE).exists():
            logger.warning("memory: %s", error)
        return Lineage()


def mark_verified_up_to(folder: Path, step: int) -> None:
    """Record that an audit has agreed after a step of the start that uses the folder.

    Raises:
        OSError: shared memory cannot be written.
    """
    write_line(folder, read_line(folder).model_copy(update={"verified": step}))


_CONNECT_S = 10.0
_ANSWER_S = 60.0
"""Seconds that a partner may take to receive a piece of a slot, or to compare the slot, before it counts as lost."""
_LARGEST_RECORD = 64 << 20
_PIECE = 1 << 22


def partner_of(dims: ParallelDims, nodes: Mapping[str, Sequence[int]], rank: int) -> int | None:
    """The rank whose writer keeps copies for a rank, on another host; None: there is only one host.

    If possible it is outside the hosts of the rank's replica, since these are excluded together if it is not clear
    which of them is faulty.

    Args:
        dims: position of any rank in the layout.
        nodes: ranks of each host, in an order that is the same everywhere.
        rank: global rank whose slots are copied.
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
    """The names after a given one, then those before it."""
    start = names.index(name)
    return [*names[start + 1 :], *names[:start]]


def _replica(dims: ParallelDims, rank: int) -> int:
    return ParallelDims(dims.tensor, dims.pipeline, dims.data, rank).dp_rank


class PartnerReplicas:
    """Receives slots of other hosts' ranks, each sender in a thread of its own.

    Args:
        folder: folder of the run in shared memory.
        address: address of this host to listen on.

    Raises:
        OSError: the address is unknown, or not one of this host's.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.token = secrets.token_bytes(SECRET_BYTES)
        self._folder = folder
        self._door = Door(address, self.token, self._serve)

    @property
    def port(self) -> int:
        """TCP port on which it listens."""
        return self._door.port

    def _serve(self, connection: socket.socket, _hello: object) -> None:
        with contextlib.suppress(OSError, ValueError, CheckpointError):  # the sender notices the closed connection
            while True:
                self._receive_slot(connection)

    def _receive_slot(self, connection: socket.socket) -> None:
        """Receive a slot, and answer whether it is what its record says.

        Raises:
            OSError: the connection was closed, or memory is full, or the sender does not keep to the protocol.
            CheckpointError: what was sent is no record.
        """
        exchange = BoundedExchange(connection, math.inf)
        message = exchange.message(_LARGEST_RECORD)
        name, text = message.get("slot"), message.get("record")
        if not (isinstance(name, str) and name.isidentifier() and isinstance(text, str)):
            raise WireError(f"{name!r} is no slot")
        record: SlotManifest = read_text(Path(SLOT_MANIFEST_FILE), text, SlotManifest, SLOT_FORMAT_VERSION)
        slot = rank_folder(self._folder / GUESTS, record.rank) / name
        make_within(self._folder, slot)
        (slot / SLOT_MANIFEST_FILE).unlink(missing_ok=True)
        known = {file.name for file in record.files}
        for path in slot.iterdir():
            if path.name not in known:
                path.unlink()
        right = [_receive_file(connection, slot / file.name, file) for file in record.files]
        if all(right):
            write_durably(slot / SLOT_MANIFEST_FILE, text)
        exchange.send_json({"right": all(right)}, _LARGEST_RECORD)


def _receive_file(connection: socket.socket, path: Path, file: SlotFile) -> bool:
    """Receive a file into memory that is reused; returns whether it has the recorded digest."""
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


class Partner:
    """The connection to the writer that keeps copies of this rank's slots.

    Raises:
        OSError: it cannot be reached.
    """

    def __init__(self, address: str, port: int, token: bytes) -> None:
        self._connection = connect(address, port, token, {}, _CONNECT_S)

    def send(self, slot: Path, record: SlotManifest) -> None:
        """Send a slot, and wait until the partner has compared it with its record.

        Raises:
            OSError: the partner has gone, or the slot did not arrive as it was recorded.
        """
        message = {"slot": slot.name, "record": record_text(record)}
        BoundedExchange(self._connection, _ANSWER_S).send_json(message, _LARGEST_RECORD)
        self._connection.settimeout(_ANSWER_S)
        for file in record.files:
            with open(slot / file.name, "rb") as opened:
                self._connection.sendfile(opened)
        if BoundedExchange(self._connection, _ANSWER_S).message(_LARGEST_RECORD) != {"right": True}:
            raise OSError("what arrived there is not what its digests say")

    def close(self) -> None:
        """End the connection."""
        self._connection.close()
