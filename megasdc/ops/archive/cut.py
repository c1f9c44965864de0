"""Cutting the bytes of a file into blocks: large tensors and large parameters by themselves, all else together.

A parameter in a flat shard of the optimizer begins a block of its own, so that its blocks are the same wherever it
lies: the fp32 weights of a layer's file and the master weights of a shard are stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, Protocol

import xxhash

from megasdc.checkpoint.manifest import Content, TensorContent, parts_of
from megasdc.ops.archive.block import BLOCK_BYTES
from megasdc.ops.archive.moments import MOMENTS, Moment
from megasdc.ops.archive.planes import WIDTHS

LARGE_BYTES = 64 << 10
"""Smallest tensor or parameter that has blocks of its own."""


class ByteRange(Protocol):
    """A range of a file's bytes."""

    @property
    def offset(self) -> int:
        """Its first byte."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its length."""
        ...


@dataclass(frozen=True)
class TypedRange:
    """A range of a file that has blocks of its own; ``width``: bytes of a floating-point number, 1: something else."""

    offset: int
    size_bytes: int
    width: int
    moment: Moment | None


@dataclass(frozen=True)
class BlockPiece:
    """The bytes of one block in a file: offset and size of each part of it, in order."""

    parts: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the block."""
        return sum(size for _, size in self.parts)


def find_ranges(name: str, content: Content | None) -> list[TypedRange]:
    """The ranges of a file that have blocks of their own, in order; none if nothing is known of its content."""
    found: list[TypedRange] = []
    end = 0
    for tensor in () if content is None else content.tensors:
        if tensor.offset < end:  # a view of what the tensor before it holds
            continue
        end = tensor.offset + tensor.size_bytes
        found += _ranges_of_tensor(name, tensor, content) if content is not None else []
    return found


def _ranges_of_tensor(name: str, tensor: TensorContent, content: Content) -> Iterator[TypedRange]:
    kind, _, _ = tensor.type.partition("[")
    width, slot = WIDTHS.get(kind, 1), tensor.name.rpartition("/")[2]
    moment = MOMENTS.get(slot) if kind == "float32" else None
    cuts = {0, tensor.size_bytes}
    for _, _, first, count in parts_of(name, tensor, content):
        start, stop = first * width, (first + count) * width
        if width > 1 and stop - start >= LARGE_BYTES and stop <= tensor.size_bytes:
            cuts |= {start, stop}
    for start, stop in pairwise(sorted(cuts)):
        if stop - start >= LARGE_BYTES:
            yield TypedRange(tensor.offset + start, stop - start, width, moment)


def cut(size_bytes: int, ranges: Sequence[ByteRange]) -> Iterator[BlockPiece]:
    """Cut a file into blocks: those of each range, then those of all other bytes, one after the other."""
    for one in ranges:
        for start in range(0, one.size_bytes, BLOCK_BYTES):
            yield BlockPiece(((one.offset + start, min(BLOCK_BYTES, one.size_bytes - start)),))
    parts: list[tuple[int, int]] = []
    room = BLOCK_BYTES
    for start, stop, number in _segments(size_bytes, ranges):
        place = start
        while number is None and place < stop:
            taken = min(room, stop - place)
            parts.append((place, taken))
            place, room = place + taken, room - taken
            if not room:
                yield BlockPiece(tuple(parts))
                parts, room = [], BLOCK_BYTES
    if parts:
        yield BlockPiece(tuple(parts))


def count_blocks(size_bytes: int, ranges: Sequence[ByteRange]) -> int:
    """Number of blocks of ``cut``."""
    rest = size_bytes - sum(one.size_bytes for one in ranges)
    return sum(-(-one.size_bytes // BLOCK_BYTES) for one in ranges) + -(-rest // BLOCK_BYTES)


class Cutter:
    """Reads a file once, from its first byte to its last, and gives its blocks; ``digest`` is its XXH3-128 then."""

    def __init__(self, file: BinaryIO, size_bytes: int, ranges: Sequence[TypedRange]) -> None:
        self._file, self._size_bytes, self._ranges = file, size_bytes, ranges
        self._whole = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        """Of what was read so far."""
        return self._whole.hexdigest()

    def blocks(self) -> Iterator[tuple[int, bytes, TypedRange | None]]:
        """Yield each block's number in ``cut``, its bytes, and its range, None: it is of the other bytes.

        EOFError if the file is too short.
        """
        firsts, total = [], 0
        for one in self._ranges:
            firsts.append(total)
            total += -(-one.size_bytes // BLOCK_BYTES)
        rest = bytearray()
        for start, stop, number in _segments(self._size_bytes, self._ranges):
            for index, place in enumerate(range(start, stop, BLOCK_BYTES)):
                data = self._read(min(BLOCK_BYTES, stop - place))
                if number is not None:
                    yield firsts[number] + index, data, self._ranges[number]
                    continue
                rest += data
                if len(rest) >= BLOCK_BYTES:
                    yield total, bytes(rest[:BLOCK_BYTES]), None
                    total += 1
                    del rest[:BLOCK_BYTES]
        if rest:
            yield total, bytes(rest), None

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise EOFError(f"it ends {size - len(data)} bytes early")
        self._whole.update(data)
        return data


def _segments(size_bytes: int, ranges: Sequence[ByteRange]) -> Iterator[tuple[int, int, int | None]]:
    """Cut a file at the ends of its ranges; yields start, stop and number of the range, None: between ranges."""
    place = 0
    for number, one in enumerate(ranges):
        if place < one.offset:
            yield place, one.offset, None
        place = one.offset + one.size_bytes
        yield one.offset, place, number
    if place < size_bytes:
        yield place, size_bytes, None
