"""Which ranges of tensors does a thread read and digest in one go? A large one, or many small ones of one checkpoint.

Opening a file, asking whether it is still as it was and handing over a task cost as much as reading a million bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from megasdc.checkpoint.extents import Extent, Reader
from megasdc.checkpoint.open_copy import OpenCopy
from megasdc.errors import CheckpointError

BATCH_BYTES = 1 << 24
"""Of one task of a thread."""
_RANGE_COST_BYTES = 1 << 20
"""What a range costs beside being read, as bytes that could be read meanwhile."""
_READ_BYTES = 1 << 21
"""Read at once: large beside what a step in Python costs, small enough for the caches, where the digest finds it."""


@dataclass(frozen=True)
class Range:
    """Elements of a copy of a tensor.

    Attributes:
        opened: the copy.
        start: the first.
        stop: the first that is not of them any more.
    """

    opened: OpenCopy
    start: int
    stop: int

    @property
    def cost_bytes(self) -> int:
        """What reading it costs."""
        return (self.stop - self.start) * self.opened.dtype.itemsize + _RANGE_COST_BYTES

    @property
    def files(self) -> set[Path]:
        """Files that hold its copy."""
        return {source.file for source in self.opened.sources if isinstance(source, Extent)}


Digest = bytes | CheckpointError
"""XXH3-128 of the bits of a range, or why it could not be read."""


@dataclass
class _Batch:
    """Ranges that are read by one task, which begins once there are enough or one of them is asked for."""

    pool: ThreadPoolExecutor
    ranges: list[Range] = field(default_factory=list)
    cost_bytes: int = 0
    future: Future[list[Digest]] | None = None

    def add(self, one: Range) -> None:
        self.ranges.append(one)
        self.cost_bytes += one.cost_bytes
        if self.cost_bytes >= BATCH_BYTES:
            self.start()

    def start(self) -> Future[list[Digest]]:
        if self.future is None:
            self.future = self.pool.submit(_digest_ranges, self.ranges)
        return self.future


@dataclass(frozen=True)
class PendingDigest:
    """A digest that is being computed."""

    batch: _Batch
    place: int

    def result(self) -> bytes:
        """Wait for it.

        Raises:
            CheckpointError: a file cannot be read, or is not as it was.
        """
        found = self.batch.start().result()[self.place]
        if isinstance(found, CheckpointError):
            raise found
        return found


class RangeDigester:
    """Has ranges digested by threads.

    Args:
        pool: the threads.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._filling: dict[Hashable, _Batch] = {}

    def digest(self, group: Hashable, one: Range) -> PendingDigest:
        """Let a range be digested.

        Args:
            group: ranges of the same group are read by the same task, such as those of a checkpoint.
            one: the range.
        """
        batch = self._filling.get(group)
        if batch is None or batch.future is not None:
            batch = self._filling[group] = _Batch(self._pool)
        batch.add(one)
        return PendingDigest(batch, len(batch.ranges) - 1)


def _digest_ranges(ranges: list[Range]) -> list[Digest]:
    """Digest ranges one after the other; those of files that changed meanwhile count as not read."""
    buffer = torch.empty(_READ_BYTES, dtype=torch.uint8)
    reader = Reader()
    try:
        found = [_digest(one, buffer, reader) for one in ranges]
    finally:
        changed = reader.close()
    if not changed:
        return found
    errors = [next((changed[file] for file in one.files if file in changed), None) for one in ranges]
    return [digest if error is None else error for digest, error in zip(found, errors, strict=True)]


def _digest(one: Range, buffer: torch.Tensor, reader: Reader) -> Digest:
    state, size = xxhash.xxh3_128(), one.opened.dtype.itemsize
    try:
        for first, last in one.opened.ranges(_READ_BYTES, one.start, one.stop):
            read = buffer[: (last - first) * size]
            one.opened.fill(first, read.view(one.opened.dtype), reader)
            state.update(read.numpy().data)
    except CheckpointError as error:
        return error
    return state.digest()
