"""Checksums of the blocks of a ``.bin`` file, so that part of a large file can be checked.

They lie beside it in ``SPLIT.checksums``: the XXH3-64 of each ``block_bytes`` from the file's start, as little-endian
unsigned 64-bit integers; the last block may be shorter. A block is about the size of the operating system's read-ahead
for one sample, so that checking it at its first read costs microseconds and no further reads.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from megasdc.common.errors import DataError

BLOCK_BYTES = 1 << 16
NUM_SAMPLED = 16
"""Number of blocks of each ``.bin`` file that every rank checks at its start."""
REMEDY = "copy the folder again, or prepare the data again with --force; megasdc verify-data names all that is damaged"
_DTYPE = np.dtype("<u8")


def num_blocks(size_bytes: int, block_bytes: int) -> int:
    """Number of blocks of a file."""
    return -(-size_bytes // block_bytes)


def checksums_file(path: Path) -> Path:
    """The file with the checksums of a ``.bin`` file."""
    return path.with_suffix(".checksums")


def write_checksums(path: Path, block_bytes: int = BLOCK_BYTES) -> Path:
    """Write the checksums of a ``.bin`` file beside it; returns the file."""
    found = []
    with open(path, "rb") as file:
        while block := file.read(block_bytes):
            found.append(xxhash.xxh3_64_intdigest(block))
    target = checksums_file(path)
    np.array(found, dtype=_DTYPE).tofile(target)
    return target


class BlockChecksums:
    """The checksums of one ``.bin`` file, in blocks of ``block_bytes``; OSError if they cannot be read."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self._expected: np.ndarray = np.memmap(checksums_file(path), dtype=_DTYPE, mode="r")

    def __len__(self) -> int:
        return len(self._expected)

    def problem(self, number: int, block: bytes | memoryview) -> str | None:
        """Problem of block ``number`` (from 0); None if it has the expected checksum."""
        found, expected = xxhash.xxh3_64_intdigest(block), int(self._expected[number])
        if found == expected:
            return None
        start = number * self.block_bytes
        return (
            f"{self.path} is damaged: block {number} (bytes {start} to {start + len(block) - 1}) has checksum "
            f"{found:016x}, expected {expected:016x}"
        )

    def sample_problems(self) -> Iterator[str]:
        """Problems of the first, the last, and a few random blocks between them, drawn anew in every process.

        Other ranks and later starts thus check other blocks. The draw uses no random generator of training.
        """
        between = range(1, len(self) - 1)
        chosen = {0, len(self) - 1, *random.SystemRandom().sample(between, min(NUM_SAMPLED - 2, len(between)))}
        yield from self._problems(sorted(chosen))

    def find_problems(self) -> Iterator[str]:
        """Problems of all blocks of the file."""
        yield from self._problems(range(len(self)))

    def _problems(self, numbers: Iterable[int]) -> Iterator[str]:
        with open(self.path, "rb", buffering=0) as file:
            for number in numbers:
                file.seek(number * self.block_bytes)
                if text := self.problem(number, file.read(self.block_bytes)):
                    yield text


class BinReader(Protocol):
    """Interface of the reader with which Megatron-core's IndexedDataset reads a ``.bin`` file."""

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """``count`` elements from byte ``offset`` on."""
        ...


class CheckedReader:
    """Reads a ``.bin`` file of ``size_bytes`` and checks every block before its first use in this process."""

    def __init__(self, reader: BinReader, checksums: BlockChecksums, size_bytes: int) -> None:
        self._reader = reader
        self._checksums = checksums
        self._size_bytes = size_bytes
        self._checked = bytearray(len(checksums))

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """``count`` elements from byte ``offset`` on; DataError, which names the block, if one is damaged."""
        size = self._checksums.block_bytes
        first, end = int(offset) // size, num_blocks(int(offset) + int(count) * np.dtype(dtype).itemsize, size)
        if self._checked.count(0, first, end):
            self._check(first, end)
        return self._reader.read(dtype=dtype, count=count, offset=offset)

    def _check(self, first: int, end: int) -> None:
        size = self._checksums.block_bytes
        for number in range(first, end):
            if self._checked[number]:
                continue
            length = min(size, self._size_bytes - number * size)
            block = self._reader.read(dtype=np.uint8, count=length, offset=number * size)
            if text := self._checksums.problem(number, block.data):
                raise DataError(f"{text}; {REMEDY}")
            self._checked[number] = 1


class DirectReader:
    """Reads a ``.bin`` file of ``size_bytes`` into fresh memory, and checks every block each time.

    It shares neither mapping nor record of checked blocks with the reader of training.

    Args:
        checksums: None: the data were prepared without; nothing is checked.
    """

    def __init__(self, path: Path, checksums: BlockChecksums | None, size_bytes: int) -> None:
        self._path = path
        self._checksums = checksums
        self._size_bytes = size_bytes

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """``count`` elements from byte ``offset`` on; DataError, which names the block, if one is damaged."""
        offset, length = int(offset), int(count) * np.dtype(dtype).itemsize
        if self._checksums is None:
            return np.frombuffer(self._bytes(offset, offset + length), dtype=dtype)
        size = self._checksums.block_bytes
        first, end = offset // size, num_blocks(offset + length, size)
        content = self._bytes(first * size, min(end * size, self._size_bytes))
        for number in range(first, end):
            block = memoryview(content)[(number - first) * size : (number - first + 1) * size]
            if text := self._checksums.problem(number, block):
                raise DataError(f"{text}; {REMEDY}")
        return np.frombuffer(content, dtype=dtype, count=int(count), offset=offset - first * size)

    def _bytes(self, start: int, end: int) -> bytes:
        with open(self._path, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), end - start, start)
        if len(content) < end - start:
            raise DataError(f"{self._path} ends before byte {end}; {REMEDY}")
        return content
