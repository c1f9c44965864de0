"""Digests of every file of a checkpoint on this machine: a manifest small enough to send.

A manifest of ``megasdc manifest`` describes what was read now; a checkpoint's ``manifest.json`` describes what was
saved. Both are compared in the same way.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import (
    CHECKPOINT,
    CHECKPOINTS,
    DATA,
    MANIFEST_FILE,
    MARKER_FILE,
    RUN,
    UNIVERSAL,
    UNIVERSAL_FILE,
    VERIFIED_FILE,
    explain_folder,
    kind_of,
    list_steps,
)
from megasdc.checkpoint.files import step_folder as name_of_step
from megasdc.checkpoint.manifest import (
    BLOCK_BYTES,
    Content,
    Manifest,
    TensorContent,
    digest_file,
    read_manifest,
    read_other_nodes,
    read_universal_manifest,
)
from megasdc.checkpoint.manifest import FORMAT_VERSION as SAVED_VERSION
from megasdc.checkpoint.records import Count, Record, Time, Xxh3, read_record
from megasdc.checkpoint.verify import deleted_while_read
from megasdc.common.durable import TEMPORARY_PREFIX
from megasdc.common.errors import CheckpointError

DIGEST_VERSION = 1
DIGEST_SUFFIX = ".manifest"
NEEDED = "a checkpoint, a folder of several, a universal checkpoint, a model, or one file"
_NOT_CONTENT = {MANIFEST_FILE, MARKER_FILE, UNIVERSAL_FILE, VERIFIED_FILE}
"""Metadata files of a checkpoint: they differ between two saves of equal content."""


class FileContent(Record):
    """One file as it was read.

    Attributes:
        name: path relative to its checkpoint.
        xxh3_128: of its bytes.
        saved: its XXH3-128 when saved, from the checkpoint's manifest; None: not in a manifest.
        rank: global rank that wrote it; None: not known.
        content: its tensors and blocks; None: saved by a version that did not record them.
        problem: why it cannot be parsed, though its bytes can be read; None: it can.
    """

    name: str
    size_bytes: Count
    xxh3_128: Xxh3
    saved: Xxh3 | None
    rank: Count | None
    node: str | None
    content: Content | None
    problem: str | None

    def tensor(self, name: str) -> TensorContent | None:
        """A tensor by name; None: there is none."""
        tensors = [] if self.content is None else self.content.tensors
        return next((one for one in tensors if one.name == name), None)


class CheckpointContent(Record):
    """One checkpoint, or another folder or file that was read.

    Attributes:
        name: of its folder, if it was read with others; else empty.
        step: optimizer step; None: it has none.
        save_id: see ``Manifest``; None: it has none.
        per_node: whether each node has files of its own in it.
        files: in order of name.
    """

    name: str
    step: int | None
    save_id: str | None
    per_node: bool
    files: list[FileContent]


class Digest(Record):
    """The content of all checkpoints at a path.

    Attributes:
        host: where it was read.
        time: when, in seconds since the epoch.
        as_saved: whether it describes what was written (``manifest.json``) instead of what was read.
        checkpoints: one, or those of a folder in order of step.
    """

    format_version: int
    host: str
    path: str
    time: Time
    as_saved: bool
    checkpoints: list[CheckpointContent]

    @property
    def label(self) -> str:
        """Its name in a comparison: host and path."""
        return f"{self.host}:{self.path}"

    @property
    def files(self) -> list[FileContent]:
        """Files of all its checkpoints."""
        return [file for checkpoint in self.checkpoints for file in checkpoint.files]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


def is_digest(path: Path) -> bool:
    """Whether a path is a manifest, not something to make one of."""
    return path.is_file() and (path.suffix == DIGEST_SUFFIX or path.name == MANIFEST_FILE)


def read_digest(path: Path) -> Digest:
    """Read a manifest.

    Args:
        path: what ``megasdc manifest`` wrote, or the ``manifest.json`` of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    if path.name != MANIFEST_FILE:
        return read_record(path, Digest, DIGEST_VERSION)
    saved = read_record(path, Manifest, SAVED_VERSION)
    host = saved.node or "+".join(list(saved.nodes)[:2]) + ("+..." if len(saved.nodes) > 2 else "")
    files = [
        FileContent(**record.model_dump(exclude={"tensors"}), saved=record.xxh3_128, problem=None)
        for record in saved.files
    ]
    one = _describe("", saved, files)
    return Digest(
        format_version=DIGEST_VERSION,
        host=host,
        path=str(path),
        time=saved.time,
        as_saved=True,
        checkpoints=[one],
    )


def digest_path(
    path: Path,
    *,
    jobs: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Digest:
    """Read all files at a path once and digest them.

    Args:
        path: a checkpoint of any layout, a folder of several, a universal checkpoint, a folder of a model, or a file.
        jobs: threads that read; None: one per core that this process may use. Digests are computed without the GIL.
        block_bytes: size of a block of a tensor.
        progress: called with the number of bytes of each piece read.

    Raises:
        CheckpointError: the path is none of these, or a file of it cannot be read.
    """
    folders = {name: path / name if name else path for name in _names(path)}
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        found = []
        for name, folder in folders.items():
            try:
                found.append(_digest_one(name, folder, pool, block_bytes, progress))
            except CheckpointError:
                if len(folders) == 1 or folder.exists():
                    raise  # else a running job has deleted an old one meanwhile
    return Digest(
        format_version=DIGEST_VERSION,
        host=socket.gethostname(),
        path=str(path.resolve()),
        time=time.time(),
        as_saved=False,
        checkpoints=found,
    )


def count_bytes(path: Path) -> int:
    """The bytes that ``digest_path`` reads; CheckpointError if there is nothing to read."""
    return sum(file.stat().st_size for name in _names(path) for file in _files(path / name if name else path))


def _names(path: Path) -> list[str]:
    """Names of the checkpoints in a folder of several; a single empty one where the path itself is read."""
    if path.is_file():
        return [""]
    if not path.is_dir():
        raise CheckpointError(f"{path} is not there; needed is {NEEDED}")
    kind = kind_of(path)
    if kind == CHECKPOINTS:
        return [name_of_step(step) for step in list_steps(path)]
    if kind in (RUN, DATA):
        raise CheckpointError(explain_folder(path, NEEDED) or str(path))
    if not _files(path):
        raise CheckpointError(f"{path} holds no file; needed is {NEEDED}")
    return [""]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]

    def is_content(file: Path) -> bool:
        name = file.relative_to(path).as_posix()
        of_node = name.startswith("manifest.") and name.endswith(".json")
        return file.is_file() and name not in _NOT_CONTENT and not of_node and not name.startswith(TEMPORARY_PREFIX)

    return sorted(file for file in path.rglob("*") if is_content(file))


def _digest_one(
    name: str, folder: Path, pool: ThreadPoolExecutor, block_bytes: int, progress: Callable[[int], None] | None
) -> CheckpointContent:
    saved = _saved(folder)
    records = {} if saved is None else {record.name: record for record in saved.files}

    def read(file: Path) -> FileContent:
        own = file.name if file == folder else file.relative_to(folder).as_posix()
        record = records.get(own)
        try:
            found = digest_file(file, block_bytes=block_bytes, progress=progress)
        except OSError as error:
            if not folder.exists():
                raise CheckpointError(deleted_while_read(folder)) from error
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        return FileContent(
            name=own,
            **vars(found),
            saved=None if record is None else record.xxh3_128,
            rank=None if record is None else record.rank,
            node=None if record is None else record.node,
        )

    return _describe(name, saved, list(pool.map(read, _files(folder))))


def _describe(name: str, saved: Any, files: list[FileContent]) -> CheckpointContent:
    of_layout = isinstance(saved, Manifest)
    return CheckpointContent(
        name=name,
        step=None if saved is None else saved.step,
        save_id=saved.save_id if of_layout else getattr(saved, "conversion_id", None),
        per_node=of_layout and saved.storage == "node_local",
        files=files,
    )


def _saved(folder: Path) -> Any:
    """The manifest of a checkpoint, with the records of other nodes found here; None if there is none."""
    kind = kind_of(folder) if folder.is_dir() else None
    if kind == UNIVERSAL:
        return read_universal_manifest(folder)
    if kind != CHECKPOINT:
        return None
    manifest = read_manifest(folder)
    more = [file for other in read_other_nodes(folder) if other.save_id == manifest.save_id for file in other.files]
    return manifest.model_copy(update={"files": manifest.files + more})
