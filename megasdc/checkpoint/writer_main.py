"""Program of a rank's writer process, which seals, writes, renames and deletes files while the rank trains.

It runs with idle priority, and ends with its rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xxhash

from megasdc.checkpoint.files import hash_file
from megasdc.checkpoint.host_memory import SLOT_MANIFEST_FILE, Partner, PartnerReplicas, SlotFile, SlotManifest
from megasdc.checkpoint.records import write_record
from megasdc.checkpoint.writer_process import (
    Act,
    Join,
    Listen,
    StoredFile,
    StoreTask,
    TakenFile,
    TaskResult,
    act,
    describe_stored,
    error_result,
    seal,
    write_texts,
)
from megasdc.common.durable import sync_path

_PIECE = 1 << 23
_HOST_ALGORITHM = "xxh3_64.v1"
"""Name of the checksum algorithm that is computed here without torch."""
_PR_SET_PDEATHSIG = 1


class TornError(Exception):
    """A part of a snapshot's file differs from the rank's tensor or pickle."""


def main(connection: Connection, parent: int, *, describes: bool) -> None:
    """Do tasks until the rank has closed the pipe or has ended.

    Args:
        connection: pipe to the rank.
        parent: process id of the rank.
        describes: whether it will describe files, so that the modules for that are loaded now.
    """
    _follow(parent)
    if describes:
        importlib.import_module("megasdc.checkpoint.save")
        importlib.import_module("deepspeed.runtime.zero.config")
    exchange = _Exchange()
    tasks: dict[type, Callable[[Any], TaskResult]] = {
        StoreTask: exchange.store,
        Act: act,
        Listen: exchange.listen,
        Join: exchange.join,
    }
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        began = time.monotonic()
        try:
            answer = tasks[type(task)](task)
        except TornError as error:
            answer = TaskResult(str(error))
        except Exception as error:  # whatever it is, the rank must be told
            answer = error_result(error)
        try:
            connection.send(replace(answer, took_s=time.monotonic() - began))
        except OSError:
            return


def _follow(parent: int) -> None:
    """Leave signals to the rank, and end when the rank ends."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


class _Exchange:
    """Tasks of a writer with partners: one that keeps copies of its slots, and others whose copies it keeps."""

    def __init__(self) -> None:
        self._partner: Partner | None = None
        self._guests: PartnerReplicas | None = None

    def listen(self, task: Listen) -> TaskResult:
        """Start to receive slots of other hosts' ranks; the result has port and secret."""
        self._guests = PartnerReplicas(task.folder, task.address)
        return TaskResult(port=self._guests.port, token=self._guests.token)

    def join(self, task: Join) -> TaskResult:
        """Connect to a partner, which gets a copy of each further slot."""
        try:
            self._partner = Partner(task.address, task.port, task.token)
        except OSError as error:
            return TaskResult(f"the partner at {task.address} port {task.port} cannot be reached: {error}")
        return TaskResult()

    def store(self, task: StoreTask) -> TaskResult:
        """Store a snapshot here, and a memory slot also at the partner."""
        answer = store(task)
        if self._partner is not None and task.held is not None:
            try:
                self._partner.send(task.target, slot_manifest(task, answer.stored))
            except OSError as error:
                return TaskResult(f"its partner keeps no copy: {error}")
        return answer


def store(task: StoreTask) -> TaskResult:
    """Seal, write and check files.

    A file's content is compared with the rank's checksums only after its digest was taken: an earlier change is found
    here, a later one by whoever compares the digest.

    Raises:
        TornError: a part of a file differs from the rank's tensor or pickle.
        OSError: a disk is full, or a folder is not writable.
        CheckpointError: a pickle would be refused when loaded.
    """
    for file in task.files:
        with _mapped(file.path, file) as view:
            seal(view, file.layout)
        if not task.in_place:
            _copy(file.path, task.target / file.name)
    write_texts(task)
    described = {file.name: file.described for file in task.files} | dict.fromkeys(task.texts)
    tell = _digested if task.in_place else describe_stored
    stored = [tell(task.target / name, one) for name, one in described.items()]
    for file in task.files:
        with _mapped(task.target / file.name, file) as view:
            _check(view, file)
    if task.held is not None:  # last of all
        write_record(task.target / SLOT_MANIFEST_FILE, slot_manifest(task, stored))
    return TaskResult(stored=stored)


def slot_manifest(task: StoreTask, stored: list[StoredFile]) -> SlotManifest:
    """Record of a memory slot with its stored files."""
    files = [
        SlotFile(name=one.name, size_bytes=one.size_bytes, xxh3_128=one.xxh3_128, tensors=one.described)
        for one in sorted(stored, key=lambda one: one.name)
    ]
    return SlotManifest(**(task.held or {}), files=files)


@contextlib.contextmanager
def _mapped(path: Path, file: TakenFile) -> Iterator[memoryview]:
    with (
        open(path, "r+b") as opened,
        mmap.mmap(opened.fileno(), file.layout.size_bytes) as memory,
        memoryview(memory) as view,
    ):
        yield view


def _check(view: memoryview, file: TakenFile) -> None:
    """Compare all tensors, the pickle and the notes of a file."""
    tensors = zip(file.checksums, file.element_bytes, strict=True)
    contents = iter(file.contents)
    for member in file.layout.members:
        if member.content is None:
            (told, element_bytes), algorithm = next(tensors), file.algorithm
        else:
            told, element_bytes, algorithm = next(contents), 1, _HOST_ALGORITHM
        with view[member.offset : member.offset + member.size_bytes] as part:
            if member.size_bytes and _checksum(part, algorithm, element_bytes) != told:
                raise TornError(
                    f"{member.name} in the snapshot of {file.name} is not what was copied: it changed while it was "
                    "copied, or memory is damaged"
                )


def _checksum(part: memoryview, algorithm: str, element_bytes: int) -> int:
    if algorithm == _HOST_ALGORITHM:
        return xxhash.xxh3_64_intdigest(part)
    import torch

    from megasdc.tensors.checksum import checksum

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return checksum(torch.frombuffer(part, dtype=kinds[element_bytes]), algorithm)


def _digested(path: Path, described: dict[str, str] | None) -> StoredFile:
    return StoredFile(path.name, path.stat().st_size, hash_file(path), described, None)


def _copy(source: Path, target: Path) -> None:
    """Copy a file, and wait until it is on the disk."""
    with open(source, "rb") as read, open(target, "wb") as written:
        while os.sendfile(written.fileno(), read.fileno(), None, _PIECE):
            pass
    sync_path(target)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]), describes=sys.argv[3] == "1")
