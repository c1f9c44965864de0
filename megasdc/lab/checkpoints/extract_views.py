"""Views of the blocks of an extract, for comparison with the folder or the extract of the other side.

Each tensor is assembled: differing blocks from each side, the others, which are equal, from a folder, or zeros if there
is no folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megasdc.checkpoint.manifest import digest_file, parts_of
from megasdc.checkpoint.views import TENSOR_SLOTS, Copy, Entry, Piece, View, WriterRank
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.digests import differing_blocks
from megasdc.lab.checkpoints.extract import (
    EXTRACT_SUFFIX,
    Extract,
    ExtractedTensor,
    Key,
    locate_file,
    read_block,
    read_extract,
)


def is_extract(path: Path) -> bool:
    """Whether a path is an extract."""
    return path.is_file() and path.suffix == EXTRACT_SUFFIX


@dataclass
class _Side:
    """Source of the blocks of one side: an extract, or a folder that has all."""

    path: Path
    extract: Extract | None
    tensors: dict[Key, ExtractedTensor] = field(default_factory=dict)

    def block(self, key: Key, number: int) -> bytes:
        if self.extract is not None:
            return self.extract.read_block(key, number)
        one = self.tensors[key]
        start, size = one.extent(number)
        file = locate_file(self.path, one.checkpoint, one.file)
        return read_block(file, one.tensor.offset + start, size, one.tensor.block(number))


def open_extract_views(paths: Sequence[Path]) -> list[View]:
    """Open extracts, and what they are compared with, as views of the tensors in the extracts.

    Args:
        paths: at least one extract; the others are extracts, folders or files of the other side.

    Raises:
        CheckpointError: one is damaged, or tensors differ in type or size.
    """
    sides = [_Side(path, read_extract(path) if is_extract(path) else None) for path in paths]
    of_extracts: dict[Key, ExtractedTensor] = {}
    for side in sides:
        if side.extract is not None:
            side.tensors = {one.key: one for one in side.extract.index.tensors}
            of_extracts |= side.tensors
    for side in sides:
        if side.extract is None:
            side.tensors = _read_sides_tensors(side.path, of_extracts)
    views = [_view(side) for side in sides]
    for key in of_extracts:
        _add(key, sides, views)
    return views


def _read_sides_tensors(path: Path, wanted: dict[Key, ExtractedTensor]) -> dict[Key, ExtractedTensor]:
    """Digest the tensors of a folder that are in an extract; only their files are read."""
    found = {}
    for key, like in wanted.items():
        file = locate_file(path, key[0], key[1])
        try:
            content = digest_file(file, block_bytes=like.content.block_bytes).content
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        tensors = [one for one in content.tensors if one.name == key[2]]
        if tensors:
            update = {"content": content.model_copy(update={"tensors": tensors}), "blocks": []}
            found[key] = like.model_copy(update=update)
    return found


def _view(side: _Side) -> View:
    if side.extract is None:
        return View(side.path, "folder", None, TENSOR_SLOTS)
    index = side.extract.index
    return View(side.path, f"blocks of {index.host}:{index.path}", None, TENSOR_SLOTS)


def _add(key: Key, sides: list[_Side], views: list[View]) -> None:
    """Put one tensor into the views of the sides that have it."""
    having = [side for side in sides if key in side.tensors]
    extracted = {number for side in having for number in side.tensors[key].blocks}
    first = having[0].tensors[key]
    different: set[int] = set()
    for side in having[1:]:
        other = side.tensors[key].tensor
        if (other.type, other.size_bytes) != (first.tensor.type, first.tensor.size_bytes):
            raise CheckpointError(f"{side.path} holds {other.type} as {key[2]}, {having[0].path} {first.tensor.type}")
        different |= set(differing_blocks(first.tensor, other))
    base = next((side for side in having if side.extract is None), None)
    for side, view in zip(sides, views, strict=True):
        if key in side.tensors:
            one = side.tensors[key]
            stored = partial(_assemble, side, base, key, different)
            _add_parts(view, one, locate_file(side.path, one.checkpoint, one.file), stored, different | extracted)


def _add_parts(view: View, one: ExtractedTensor, file: Path, stored: partial[Tensor], blocks: set[int]) -> None:
    owner = WriterRank(rank=one.rank, host=one.node)
    dtype = one.tensor.dtype or torch.uint8
    shape = (one.tensor.size_bytes,) if one.tensor.dtype is None else one.tensor.shape
    numel = prod(shape)
    known = list(parts_of(one.file, one.tensor, one.content)) if one.tensor.dtype is not None else []
    touched = [[place // dtype.itemsize for place in (start, start + size)] for start, size in map(one.extent, blocks)]
    for fqn, slot, begin, count in known or [(one.tensor.name, "weight", 0, numel)]:
        if any(begin < end and begin + count > start for start, end in touched):
            own = shape if count == numel else (count,)
            piece = Piece(file, owner, count, stored, begin, shape, dtype)
            where = "/".join(filter(None, (one.checkpoint, one.file)))
            name = f"{fqn} ({where})" if where else fqn
            view.entries[name, slot] = Entry((Copy(own, ((piece,),)),))  # type: ignore[index]  # slots of parts_of


def _assemble(side: _Side, base: _Side | None, key: Key, different: set[int]) -> Tensor:
    """Assemble a whole tensor of one side."""
    one = side.tensors[key]
    content = bytearray(one.tensor.size_bytes)
    count = -(-one.tensor.size_bytes // one.content.block_bytes)
    for number in range(count):
        source = side if number in different else base
        if source is not None:
            start, size = one.extent(number)
            content[start : start + size] = source.block(key, number)
    dtype = one.tensor.dtype
    if dtype is None:
        return torch.frombuffer(content, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=dtype).view(one.tensor.shape)
