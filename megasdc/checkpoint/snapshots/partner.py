"""Copies of a rank's snapshots in the memory of another host, from writer to writer over TCP; no torch.

A writer listens on one address of its host and lets in whoever knows its secret (``megasdc.common.wire``), which went
to the other ranks through ``torch.distributed``. A slot's record comes first, which names each file with its size and
digest, then the files; what arrives is compared with the record, and counts once all of it is right. Nothing is
encrypted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from megasdc.checkpoint.records import read_text, record_text
from megasdc.checkpoint.snapshots.held import (
    FORMAT_VERSION,
    GUESTS,
    HELD_FILE,
    HeldFile,
    SlotManifest,
    make_within,
    rank_folder,
)
from megasdc.common.durable import write_durably
from megasdc.common.errors import CheckpointError
from megasdc.common.wire import GONE, SECRET_BYTES, Door, connect
from megasdc.parallel.dims import ParallelDims

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
        record: SlotManifest = read_text(Path(HELD_FILE), text, SlotManifest, FORMAT_VERSION)
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
