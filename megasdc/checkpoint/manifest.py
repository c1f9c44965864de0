"""What belongs to a checkpoint, and is it unchanged? The manifest: every file with its size, checksum and writer.

A manifest names its own checksum too, so that a changed byte anywhere in the folder is found. Where each node has a
folder of its own there is a manifest on each node; they share ``save_id``, which is new for every save.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from megasdc.checkpoint.files import MANIFEST_FILE, MARKER_FILE, hash_file, write_durably
from megasdc.errors import CheckpointError

FORMAT_VERSION = 1
R = TypeVar("R", bound=BaseModel)
_PACKAGES = ("megasdc", "torch", "deepspeed", "megatron-core", "numpy")


class Record(BaseModel):
    """Base of the parts of a manifest: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class FileRecord(Record):
    """One file of a checkpoint.

    Attributes:
        name: path relative to the checkpoint's folder.
        size_bytes: its size.
        xxh3_128: checksum of its bytes.
        rank: global rank that wrote it.
        node: node that rank was on.
        tensors: for a layer's file, data type and shape of each tensor, such as ``float32[64, 64]``; else null.
    """

    name: str
    size_bytes: int
    xxh3_128: str
    rank: int
    node: str
    tensors: dict[str, str] | None = None


class Layout(Record):
    """Sizes of the parallel dimensions."""

    tensor: int
    pipeline: int
    data: int

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x DP{self.data}"


class Manifest(Record):
    """Everything known about one checkpoint without opening its files.

    Attributes:
        state: always ``complete``: a manifest is written last.
        step: optimizer step, first is 1.
        save_id: the same in all manifests of one save, and in no other save's.
        time: when it was written, in seconds since the epoch.
        storage: ``shared``: the folder holds all files; ``node_local``: those of this node.
        nodes: global ranks of each node.
        node: the node whose files these are; null with shared storage.
        engine: names of the optimizer classes and the number of steps taken, compared before loading.
        versions: of the packages that wrote the files.
        files: in order of name.
    """

    format_version: int
    state: Literal["complete"]
    step: int
    save_id: str
    time: float
    layout: Layout
    world_size: int
    storage: Literal["shared", "node_local"]
    nodes: dict[str, list[int]]
    node: str | None
    engine: dict[str, Any]
    versions: dict[str, str]
    files: list[FileRecord]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, the manifest not counted."""
        return sum(record.size_bytes for record in self.files)

    def by_name(self) -> dict[str, FileRecord]:
        """The files by name."""
        return {record.name: record for record in self.files}


def describe_file(
    folder: Path, name: str, *, rank: int, node: str, tensors: dict[str, str] | None = None
) -> FileRecord:
    """Measure a file that this rank has written.

    Args:
        folder: folder of the checkpoint.
        name: path relative to it.
        rank: this rank.
        node: this rank's node.
        tensors: see ``FileRecord``.

    Raises:
        OSError: the file cannot be read back.
    """
    path = folder / name
    return FileRecord(
        name=name, size_bytes=path.stat().st_size, xxh3_128=hash_file(path), rank=rank, node=node, tensors=tensors
    )


def installed_versions() -> dict[str, str]:
    """Versions of the packages whose formats are in a checkpoint."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into its folder, with its own checksum.

    Raises:
        OSError: it cannot be written.
    """
    write_record(folder / MANIFEST_FILE, manifest)


def read_manifest(folder: Path, name: str = MANIFEST_FILE) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        name: its file, where another node's manifest was put beside this one's.

    Raises:
        CheckpointError: it is missing, unreadable, changed since it was written, or of another version.
    """
    return read_record(folder / name, Manifest, FORMAT_VERSION)


def write_record(path: Path, record: BaseModel) -> None:
    """Write a record as JSON, with a checksum of its own content.

    Raises:
        OSError: it cannot be written.
    """
    content = record.model_dump(mode="json")
    write_durably(path, json.dumps({**content, "checksum": _digest(content)}, indent=1, sort_keys=True) + "\n")


def read_record(path: Path, kind: type[R], version: int) -> R:
    """Read and check what ``write_record`` wrote.

    Args:
        path: the file.
        kind: class of the record; it has a field ``format_version``.
        version: the version that this code reads.

    Raises:
        CheckpointError: it is missing, unreadable, changed since it was written, or of another version.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if not text.endswith("}\n"):
            raise ValueError("its end is missing")
        content = json.loads(text)
        claimed = content.pop("checksum")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the save did not finish, or the file was removed") from error
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    if (found := _digest(content)) != claimed:
        raise CheckpointError(f"{path} was changed: its content has checksum {found}, it says {claimed}")
    if content.get("format_version") != version:
        raise CheckpointError(
            f"{path} has format version {content.get('format_version')}, this megasdc reads {version}"
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest: {error}") from error


def write_marker(folder: Path, manifest: Manifest) -> None:
    """Say on this node that every node has committed the save.

    Raises:
        OSError: it cannot be written.
    """
    write_durably(folder / MARKER_FILE, manifest.save_id + "\n")


def has_marker(folder: Path, manifest: Manifest) -> bool:
    """Whether the marker of this very save is there; shared storage needs none."""
    if manifest.storage == "shared":
        return True
    try:
        return (folder / MARKER_FILE).read_text(encoding="utf-8").strip() == manifest.save_id
    except (OSError, UnicodeDecodeError):
        return False


def _digest(content: dict[str, Any]) -> str:
    """XXH3-128 of canonical JSON."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def sorted_records(records: Iterable[FileRecord]) -> list[FileRecord]:
    """Records in order of name."""
    return sorted(records, key=lambda record: record.name)
