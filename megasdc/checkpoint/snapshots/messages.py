"""Messages between a rank and the process that writes for it; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import Fence
from megasdc.checkpoint.snapshots.torch_file import FileLayout


@dataclass(frozen=True)
class TakenFile:
    """A file of a snapshot that is filled but not sealed.

    Attributes:
        path: where other processes can open it.
        checksums: of its tensors before they were copied, in the order of the layout.
        algorithm: of the checksums.
        element_bytes: size of an element of each tensor.
        contents: XXH3-64 of the pickle and the notes, in the order of the layout.
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
    """Task: seal a snapshot's files, write them, and compare what they hold with the checksums.

    Attributes:
        target: folder to write them into.
        in_place: they lie in that folder already.
        texts: further files, by name.
        held: the record of what is held in memory but for its files; None: there is none.
    """

    files: list[TakenFile]
    target: Path
    in_place: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    held: dict[str, Any] | None = None


@dataclass(frozen=True)
class StoredFile:
    """A file that was stored.

    Attributes:
        content: ``megasdc.checkpoint.manifest.Content`` of a file that was written; None: it is in memory.
    """

    name: str
    size_bytes: int
    xxh3_128: str
    described: dict[str, str] | None
    content: Any


@dataclass(frozen=True)
class Act:
    """Task: changes of names, done in this order.

    Attributes:
        texts: files to replace.
        rename: folder's temporary and final name; None: none.
        delete: folders to delete afterwards; one that cannot be deleted is reported, the others are.
        fence: checked before; None: nothing is.
    """

    texts: dict[Path, str] = field(default_factory=dict)
    rename: tuple[Path, Path] | None = None
    delete: tuple[Path, ...] = ()
    fence: Fence | None = None


@dataclass(frozen=True)
class Listen:
    """Task: receive the slots of other hosts' ranks, as ``megasdc.checkpoint.snapshots.partner.PartnerReplicas``."""

    folder: Path
    address: str


@dataclass(frozen=True)
class Join:
    """Task: send what is held to a partner from now on."""

    address: str
    port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class TaskResult:
    """Of a task.

    Attributes:
        problem: why it failed; empty: it did not.
        is_storage: whether a disk was the cause.
        no_room: whether it had no room.
        stored: of ``StoreTask``.
        failed: a line for each folder that could not be deleted.
        took_s: seconds of the task.
        port, token: of ``Listen``.
    """

    problem: str = ""
    is_storage: bool = False
    no_room: bool = False
    stored: list[StoredFile] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    took_s: float = 0.0
    port: int = 0
    token: bytes = field(default=b"", repr=False)
