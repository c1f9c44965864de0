"""Batching of ranges for digest threads: one large range, or many small ones of one checkpoint, per task.

Opening a file, checking that it is unchanged and submitting a task cost as much as reading a million bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from megasdc.checkpoint.formats.extents import Extent, Reader
from megasdc.checkpoint.formats.open_copy import OpenCopy
from megasdc.common.errors import CheckpointError

BATCH_BYTES = 1 << 24
"""Cost at which a task is submitted."""
_RANGE_COST_BYTES = 1 << 20
"""Fixed cost of a range, in bytes that could be read in that time."""
_READ_BYTES = 1 << 21
"""Bytes of one read: large against Python's overhead, small enough to stay in the CPU caches for the digest."""


@dataclass(frozen=True)
class Range:
    """Elements ``start`` to ``stop`` (one past the last) of a copy of a tensor."""

    opened: OpenCopy
    start: int
    stop: int

    @property
    def cost_bytes(self) -> int:
        """Cost of reading it, in bytes."""
        return (self.stop - self.start) * self.opened.dtype.itemsize + _RANGE_COST_BYTES

    @property
    def files(self) -> set[Path]:
        """Files that hold its copy."""
        return {source.file for source in self.opened.sources if isinstance(source, Extent)}


Digest = bytes | CheckpointError
"""XXH3-128 of the bits of a range, or why it could not be read."""


@dataclass
class _Batch:
    """Ranges read by one task, which is submitted once it is full or a result is requested."""

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
        """Wait for it; CheckpointError if a file cannot be read, or has changed."""
        found = self.batch.start().result()[self.place]
        if isinstance(found, CheckpointError):
            raise found
        return found


class RangeDigester:
    """Digests ranges in threads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._filling: dict[Hashable, _Batch] = {}

    def digest(self, group: Hashable, one: Range) -> PendingDigest:
        """Queue a range to be digested; ranges of one group, such as a checkpoint, are read by one task."""
        batch = self._filling.get(group)
        if batch is None or batch.future is not None:
            batch = self._filling[group] = _Batch(self._pool)
        batch.add(one)
        return PendingDigest(batch, len(batch.ranges) - 1)


def _digest_ranges(ranges: list[Range]) -> list[Digest]:
    """Digest ranges one after the other; those of files that changed meanwhile become errors."""
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
