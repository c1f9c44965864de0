"""Manifest of a checkpoint: every file with its size, checksum and writer.

A manifest includes its own checksum, so that a changed byte anywhere in the folder is found. With node-local storage
each node has its own manifest; they share ``save_id``, which is new for every save.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from megasdc.checkpoint.files import MANIFEST_FILE, MARKER_FILE, list_steps, step_folder
from megasdc.checkpoint.formats.content import Content, parse_type
from megasdc.checkpoint.formats.digest_file import digest_file
from megasdc.checkpoint.formats.records import Count, Inside, Record, Time, Xxh3, read_record, write_record
from megasdc.common.durable import write_durably
from megasdc.common.errors import CheckpointError
from megasdc.parallel.dims import ParallelDims

FORMAT_VERSION = 1
_PACKAGES = ("megasdc", "torch", "deepspeed", "megatron-core", "numpy")


def _is_type(text: str) -> str:
    parse_type(text)
    return text


class FileRecord(Record):
    """One file of a checkpoint.

    Attributes:
        name: path relative to the checkpoint's folder.
        xxh3_128: checksum of its bytes.
        rank: global rank that wrote it.
        tensors: for a layer's file, data type and shape of each tensor, such as ``float32[64, 64]``; else None.
        content: its tensors and their blocks; None: saved by a version that did not record them.
    """

    name: Inside
    size_bytes: Count
    xxh3_128: Xxh3
    rank: Count
    node: str
    tensors: dict[str, Annotated[str, AfterValidator(_is_type)]] | None = None
    content: Content | None = None

    @model_validator(mode="after")
    def _tensors_are_in_it(self) -> Self:
        for tensor in () if self.content is None else self.content.tensors:
            if tensor.offset + tensor.size_bytes > self.size_bytes:
                raise ValueError(f"{tensor.name} ends after the end of {self.name}, which has {self.size_bytes} bytes")
        return self


class Layout(Record):
    """Sizes of the parallel dimensions."""

    tensor: int = Field(ge=1)
    pipeline: int = Field(ge=1)
    data: int = Field(ge=1)

    @classmethod
    def of(cls, dims: ParallelDims) -> Layout:
        """The layout that a rank's position is in."""
        return cls(tensor=dims.tensor, pipeline=dims.pipeline, data=dims.data)

    @property
    def world_size(self) -> int:
        """All ranks of it."""
        return self.tensor * self.pipeline * self.data

    def dims(self, rank: int) -> ParallelDims:
        """The position of a rank in it."""
        return ParallelDims(self.tensor, self.pipeline, self.data, rank)

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x DP{self.data}"


class KnownState(Record):
    """What is known of the values of a checkpoint without opening its files.

    Attributes:
        not_finite: names of the files, of all nodes, whose tensors (weights, masters, moments) held NaN or Inf when
            they were saved; empty: none did; None: a version saved it that did not look.
        finite_step: last step up to this one that the optimizer took with a finite loss and gradient norm, 0: none;
            None: a version saved it that did not keep it.
        wrong_place: what is wrong with its places in the data, a sentence; None: nothing was known to be.
    """

    not_finite: list[Inside] | None = None
    finite_step: Count | None = None
    wrong_place: str | None = None

    @property
    def non_finite(self) -> str | None:
        """The files whose tensors hold NaN or Inf, in a sentence; None: none is known to."""
        if not self.not_finite:
            return None
        more = f" and {len(self.not_finite) - 1} more files" if len(self.not_finite) > 1 else ""
        return f"its state is not finite: NaN or Inf in {self.not_finite[0]}{more} when it was saved"

    @property
    def problem(self) -> str | None:
        """Why no run is to go on from it, in a sentence; None: nothing is known to be wrong."""
        return self.non_finite or self.wrong_place


class Manifest(KnownState):
    """Everything known about one checkpoint without opening its files.

    Attributes:
        state: always ``complete``, because a manifest is written last.
        step: optimizer step, first is 1.
        save_id: common to all manifests of one save, unique to it.
        time: when it was written, in seconds since the epoch.
        storage: ``shared``: the folder holds all files; ``node_local``: only those of this node.
        nodes: global ranks of each node.
        node: the node whose files these are; None with shared storage.
        engine: names of the optimizer classes and the number of steps taken, compared before loading.
        files: in order of name.
        quantized_moments_bits: the optimizer's moments were quantized in the archive, so that it does not continue its
            run bit for bit; None: every bit is as it was saved.
    """

    format_version: int
    state: Literal["complete"]
    step: Count
    save_id: str
    time: Time
    layout: Layout
    world_size: int
    storage: Literal["shared", "node_local"]
    nodes: dict[str, list[int]]
    node: str | None
    engine: dict[str, Any]
    versions: dict[str, str]
    files: list[FileRecord]
    quantized_moments_bits: Literal[8] | None = None

    @model_validator(mode="after")
    def _ranks_are_of_one_world(self) -> Self:
        layout, ranks = self.layout, sorted(rank for ranks in self.nodes.values() for rank in ranks)
        if layout.world_size != self.world_size:
            raise ValueError(f"{layout} are not {self.world_size} ranks")
        if len(ranks) != self.world_size or ranks != list(range(self.world_size)):
            raise ValueError(f"the nodes do not have each of {self.world_size} ranks once")
        if (self.storage == "node_local") != (self.node in self.nodes):
            raise ValueError(f"of {self.storage} storage it cannot be of node {self.node}")
        if strange := [record.name for record in self.files if record.rank >= self.world_size]:
            raise ValueError(f"{strange[0]} was written by a rank that is none of {self.world_size}")
        check_once(self.files)
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(record.size_bytes for record in self.files)

    def by_name(self) -> dict[str, FileRecord]:
        """The files by name."""
        return {record.name: record for record in self.files}


def check_once(files: Iterable[FileRecord]) -> None:
    """Raise a ValueError if a file is listed twice."""
    if twice := [name for name, count in Counter(record.name for record in files).items() if count > 1]:
        raise ValueError(f"{twice[0]} is there twice")


def describe_file(
    folder: Path, name: str, *, rank: int, node: str, tensors: dict[str, str] | None = None
) -> FileRecord:
    """Make the record of a file that this rank has written; the file is read once.

    Args:
        name: path relative to it.
        tensors: see ``FileRecord``.

    Raises:
        OSError: the file cannot be read back.
    """
    found = digest_file(folder / name)
    return FileRecord(
        name=name,
        size_bytes=found.size_bytes,
        xxh3_128=found.xxh3_128,
        rank=rank,
        node=node,
        tensors=tensors,
        content=found.content,
    )


def installed_versions() -> dict[str, str]:
    """Versions of the packages whose formats are in a checkpoint."""
    return {package: _installed_version(package) for package in _PACKAGES}


@functools.cache  # looking through all installed packages takes tens of milliseconds
def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


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
        name: name of the manifest's file; another node's may lie beside this node's.

    Raises:
        CheckpointError: it is missing, unreadable, changed since it was written, or of another version.
    """
    return read_record(folder / name, Manifest, FORMAT_VERSION)


def read_other_nodes(folder: Path) -> list[Manifest]:
    """The manifests of other nodes, each copied into the folder as ``manifest.NODE.json`` with that node's files.

    Errors as in ``read_manifest``.
    """
    return [read_manifest(folder, path.name) for path in sorted(folder.glob("manifest.*.json"))]


def write_marker(folder: Path, manifest: Manifest) -> None:
    """Write the marker, on this node, that every node has committed the save."""
    write_durably(folder / MARKER_FILE, manifest.save_id + "\n")


def has_marker(folder: Path, manifest: Manifest) -> bool:
    """Whether the marker of this save exists; shared storage needs none."""
    if manifest.storage == "shared":
        return True
    try:
        return (folder / MARKER_FILE).read_text(encoding="utf-8").strip() == manifest.save_id
    except (OSError, UnicodeDecodeError):
        return False


def read_complete(folder: Path | str) -> dict[int, Manifest]:
    """Manifests of a folder's committed checkpoints by step, by their manifests and markers alone."""
    found = {}
    for step in list_steps(folder):
        path = Path(folder) / step_folder(step)
        with contextlib.suppress(CheckpointError):
            if has_marker(path, manifest := read_manifest(path)):
                found[step] = manifest
    return found


def list_sound(known: Mapping[int, KnownState]) -> list[int]:
    """Steps of the checkpoints that held no NaN, Inf or wrong place in the data when saved, in ascending order."""
    return sorted(step for step, one in known.items() if one.problem is None)


def list_continued(known: Mapping[int, KnownState]) -> list[int]:
    """Steps of the sound checkpoints from which a finite step was taken, in ascending order.

    Loss, gradient norm and update of that step were finite, the update since a finite checkpoint followed it: NaN in a
    state stays there. What was saved since is finite too where all steps are skipped, but leads nowhere.
    """
    sound = list_sound(known)
    reached = max((one.finite_step or 0 for one in known.values() if one.non_finite is None), default=0)
    return [step for step in sound if step < reached]


def sorted_records(records: Iterable[FileRecord]) -> list[FileRecord]:
    """Records in order of name."""
    return sorted(records, key=lambda record: record.name)
