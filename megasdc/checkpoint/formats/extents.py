"""Reading tensors from their byte ranges in files into buffers; nothing is memory-mapped.

Access to a mapped file that was truncated kills the process (SIGBUS). With reads it is an error that names the file; so
is a file that is replaced or written to during a comparison.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megasdc.common.errors import CheckpointError

_OPEN_FILES = 8
"""Files that a reader keeps open; times the number of threads, it stays under the usual limit of 1024."""


@dataclass(frozen=True)
class Stamp:
    """Identity of one state of a file: device and inode, size, and the time of the last change."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, file: Path | int) -> Stamp:
        """The stamp of a file, by its path or descriptor."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class Extent:
    """A run of elements in a file, in row-major order.

    ``stamp``: of the file when its offsets were determined; ``offset``: byte of the first element.
    """

    file: Path
    stamp: Stamp
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def run(self, start: int, numel: int) -> Extent:
        """The range of ``numel`` elements from ``start`` on, flat."""
        return replace(self, offset=self.offset + start * self.dtype.itemsize, shape=(numel,))


class ExtentReader:
    """Reads extents; for use by one thread. As a context manager it raises at the end if a file has changed."""

    def __init__(self) -> None:
        self._open: dict[Path, tuple[int, Stamp]] = {}
        self._changed: dict[Path, CheckpointError] = {}

    def __enter__(self) -> ExtentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changed = self.close()
        if kind is None and changed:
            raise next(iter(changed.values()))

    def close(self) -> dict[Path, CheckpointError]:
        """Close all files; returns the error for each file that has changed."""
        for file in list(self._open):
            self._close(file)
        return self._changed

    def read(self, extent: Extent, start: int, out: Tensor) -> None:
        """Read elements into ``out``, [n], contiguous and of the extent's type; ``start`` is the first.

        CheckpointError if the file cannot be read, or has changed.
        """
        target = memoryview(out.view(torch.uint8).numpy().data)
        place, done = extent.offset + start * extent.dtype.itemsize, 0
        try:
            descriptor = self._descriptor(extent)
            while done < len(target):
                got = os.preadv(descriptor, [target[done:]], place + done)
                if not got:
                    self._check(extent.file)
                    raise CheckpointError(f"{extent.file} ends at byte {place + done}, before a tensor that it holds")
                done += got
        except OSError as error:
            raise CheckpointError(f"{extent.file} cannot be read at byte {place + done}: {error}") from error

    def _descriptor(self, extent: Extent) -> int:
        """The open file's descriptor; if too many are open, the oldest is closed."""
        if extent.file not in self._open:
            if len(self._open) == _OPEN_FILES:
                self._close(next(iter(self._open)))
            self._open[extent.file] = (os.open(extent.file, os.O_RDONLY), extent.stamp)
            self._check(extent.file)
        return self._open[extent.file][0]

    def _close(self, file: Path) -> None:
        try:
            self._check(file)
        except CheckpointError as error:
            self._changed[file] = error
        finally:
            os.close(self._open.pop(file)[0])

    def _check(self, file: Path) -> None:
        descriptor, stamp = self._open[file]
        if (now := Stamp.of(descriptor)) != stamp:
            raise changed_error(file, stamp, now)


def changed_error(file: Path, before: Stamp, now: Stamp) -> CheckpointError:
    """The error for a file that has changed."""
    sizes = f"{before.num_bytes} bytes before, {now.num_bytes} bytes now"
    what = "replaced by another" if now.inode != before.inode else "written to"
    return CheckpointError(
        f"{file} was {what} while it was being compared ({sizes}); compare again when nothing writes to it"
    )


def place_in_file(value: Tensor) -> tuple[int, int]:
    """Byte of the first element in its file of a tensor that was loaded onto ``meta``, and number of stored elements.

    Counted from its first element to its last, gaps included.
    """
    stored: Any = value.untyped_storage()  # torch.load notes the place in the file on it (2.13)
    offset = int(stored._checkpoint_offset) + int(value.storage_offset()) * value.element_size()
    reach = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return offset, reach if value.numel() else 0


def read_whole(extent: Extent) -> Tensor:
    """Read all elements, in the extent's shape; errors as in ``ExtentReader.read``."""
    flat = torch.empty(extent.numel(), dtype=extent.dtype)
    with ExtentReader() as reader:
        reader.read(extent, 0, flat)
    return flat.view(extent.shape)
