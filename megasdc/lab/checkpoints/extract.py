"""Extracts: the differing blocks of a checkpoint in one small file, an index followed by the blocks.

For each tensor with differing blocks the index has the digests of all blocks. So the receiver knows which blocks must
be equal, and compares whole tensors though only blocks were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, Self

import xxhash
from pydantic import model_validator

from megasdc.checkpoint.manifest import DIGEST_DIGITS, Content, TensorContent
from megasdc.checkpoint.records import Record, read_text, record_text
from megasdc.common.durable import replacing
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.lab.checkpoints.digest import Digest, FileContent
from megasdc.lab.checkpoints.digest_report import DigestReport
from megasdc.lab.checkpoints.digests import differing_blocks

EXTRACT_SUFFIX = ".extract"
EXTRACT_VERSION = 1
Key = tuple[str, str, str]
"""Checkpoint in a folder of several, file, and tensor in the file; checkpoint or file is empty if there is only one."""


class ExtractedTensor(Record):
    """A tensor with blocks in an extract; ``checkpoint`` and ``file`` as in ``Key``, ``rank`` None if not known.

    ``content`` is that of the file, reduced to this tensor, with the digests of all its blocks; ``blocks`` are the
    numbers of those in the extract, ascending.
    """

    checkpoint: str
    file: str
    rank: int | None
    node: str | None
    content: Content
    blocks: list[int]

    @model_validator(mode="after")
    def _blocks_are_of_one_tensor(self) -> Self:
        if len(self.content.tensors) != 1:
            raise ValueError(f"it is of {len(self.content.tensors)} tensors")
        tensor = self.tensor
        if tensor.dtype is not None and prod(tensor.shape) * tensor.dtype.itemsize != tensor.size_bytes:
            raise ValueError(f"{tensor.name}, {tensor.type}, cannot have {tensor.size_bytes} bytes")
        if self.blocks != sorted(set(self.blocks) & set(range(len(tensor.blocks) // DIGEST_DIGITS))):
            raise ValueError(f"{tensor.name} has no such blocks")
        return self

    @property
    def tensor(self) -> TensorContent:
        """The tensor."""
        return self.content.tensors[0]

    @property
    def key(self) -> Key:
        """Its key in the extract."""
        return self.checkpoint, self.file, self.tensor.name

    def extent(self, number: int) -> tuple[int, int]:
        """First byte of a block in the tensor, and its size."""
        start = number * self.content.block_bytes
        return start, min(self.content.block_bytes, self.tensor.size_bytes - start)


class ExtractIndex(Record):
    """The first line of an extract, with host and path that were read; the blocks follow in the same order."""

    format_version: int
    host: str
    path: str
    tensors: list[ExtractedTensor]


@dataclass(frozen=True)
class Extract:
    """An extract on the disk; ``start``: offset of the first block."""

    path: Path
    index: ExtractIndex
    start: int

    def read_block(self, key: Key, number: int) -> bytes:
        """One block; CheckpointError if it is not in the extract, has changed, or cannot be read."""
        if (key, number) not in self._places:
            raise CheckpointError(
                f"{self.path} does not hold block {number} of {' '.join(filter(None, key))}, which differs too: the "
                "other side is not the one that it was made against; make its manifest and extract again"
            )
        return read_block(self.path, *self._places[key, number])

    @cached_property
    def _places(self) -> dict[tuple[Key, int], tuple[int, int, str]]:
        """First byte, size and digest of each block."""
        places, place = {}, self.start
        for one in self.index.tensors:
            for number in one.blocks:
                size = one.extent(number)[1]
                places[one.key, number] = (place, size, one.tensor.block(number))
                place += size
        return places


def read_block(path: Path, place: int, size: int, digest: str) -> bytes:
    """Read a block; CheckpointError if it has another digest, or cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(place)
            block = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if xxhash.xxh3_128_hexdigest(block) != digest:
        raise CheckpointError(f"{path} was changed at bytes {place} to {place + size - 1}: read or copy it again")
    return block


def read_extract(path: Path) -> Extract:
    """Open an extract; blocks are read on demand. CheckpointError if it is missing, damaged, or of another version."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    index = read_text(path, line.decode(errors="replace"), ExtractIndex, EXTRACT_VERSION)
    return Extract(path, index, len(line))


def write_extracts(report: DigestReport, paths: dict[int, Path], folder: Path) -> list[Path]:
    """Write the differing blocks of each side that is on this machine.

    Args:
        paths: by index in ``report.digests``, the path of that side on this machine.
        folder: output folder; created if absent.

    Returns:
        The files, one per side.

    Raises:
        CheckpointError: no blocks differ, or a file has changed since it was read.
        StorageError: they cannot be written.
    """
    wanted = _wanted(report)
    if not wanted:
        raise CheckpointError("no blocks of tensors differ: there is nothing to extract")
    written = []
    for place, path in paths.items():
        digest = report.digests[place]
        index = ExtractIndex(
            format_version=EXTRACT_VERSION,
            host=digest.host,
            path=digest.path,
            tensors=[one for key, numbers in wanted.items() if (one := _extracted(digest, path, key, numbers))],
        )
        target = folder / f"{place + 1}.{digest.host}{EXTRACT_SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(target, "wb") as file:
                _write(file, index, path)
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror}; choose another --extract") from error
        written.append(target)
    return written


def _write(file: IO[bytes], index: ExtractIndex, path: Path) -> None:
    file.write(record_text(index, indent=None).encode())
    for one in index.tensors:
        for number in one.blocks:
            start, size = one.extent(number)
            source = locate_file(path, one.checkpoint, one.file)
            file.write(read_block(source, one.tensor.offset + start, size, one.tensor.block(number)))


def locate_file(path: Path, checkpoint: str, file: str) -> Path:
    """The path of a key's file."""
    return path if path.is_file() else path / checkpoint / file


def _wanted(report: DigestReport) -> dict[Key, set[int]]:
    """Numbers of the blocks of each tensor that differ between manifests."""
    wanted: dict[Key, set[int]] = {}
    for one in report.differences:
        if one.what == "blocks":
            sides = [report.digests[report.labels.index(label)] for label in (one.digest, one.against)]
            found = [_find(side, (one.checkpoint, one.file, one.name)) for side in sides]
            got, expected = (None if file is None else file.tensor(one.name) for file in found)
            assert got is not None and expected is not None, "both have blocks"
            numbers = wanted.setdefault((one.checkpoint, one.file, one.name), set())
            numbers |= set(differing_blocks(got, expected))
    return wanted


def _find(digest: Digest, key: Key) -> FileContent | None:
    """The file of a key in a manifest."""
    checkpoints = [one for one in digest.checkpoints if not key[0] or one.name == key[0]]
    files = [file for one in checkpoints for file in one.files]
    return files[0] if len(files) == 1 else next((file for file in files if file.name == key[1]), None)


def _extracted(digest: Digest, path: Path, key: Key, numbers: Iterable[int]) -> ExtractedTensor | None:
    file = _find(digest, key)
    if file is None or file.content is None or (tensor := file.tensor(key[2])) is None:
        return None
    last = -(-tensor.size_bytes // file.content.block_bytes)
    return ExtractedTensor(
        checkpoint=key[0],
        file="" if path.is_file() else key[1],
        rank=file.rank,
        node=file.node,
        content=file.content.model_copy(update={"tensors": [tensor]}),
        blocks=sorted(number for number in numbers if number < last),
    )
