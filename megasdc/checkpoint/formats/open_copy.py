"""Range-wise access to a copy of a tensor, read from the pieces in which it is stored.

Places are flat row-major indices of the whole tensor, so that copies of any layouts are compared range by range and no
tensor has to be assembled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megasdc.checkpoint.formats.extents import Extent, ExtentReader

Part = tuple[int, int, Tensor]
"""Number of a piece, its first element, and the elements from there on as a view of a range of the whole tensor."""


class Places(Protocol):
    """Maps elements to pieces; see ``Arrangement``."""

    def cut(self, start: int, flat: Tensor) -> Iterator[Part]:
        """Cut a range of the whole tensor at piece boundaries; parts of a piece come in order."""

    def place(self, piece: int, element: int) -> int:
        """Flat index in the whole tensor of an element of a piece; ascends with ``element``."""


@dataclass(frozen=True)
class Arrangement:
    """Maps elements to pieces.

    Shards are interleaved: the whole tensor is [periods, shards, width], and shard s has [:, s] of it. This covers
    tensors split by columns, and gated ones whose halves are split. ``pieces``: elements of each piece, by shard.
    """

    numel: int
    width: int
    pieces: tuple[tuple[int, ...], ...]

    @property
    def period(self) -> int:
        """Elements of one period, over all shards."""
        return self.width * len(self.pieces)

    @cached_property
    def _starts(self) -> list[list[int]]:
        """Offset of each piece in its shard, and the end of the last."""
        return [[0, *accumulate(shard)] for shard in self.pieces]

    @cached_property
    def _numbers(self) -> list[int]:
        """Number of each shard's first piece."""
        return [0, *accumulate(map(len, self.pieces))]

    def cut(self, start: int, flat: Tensor) -> Iterator[Part]:
        """Cut a range of the whole tensor, [n] from place ``start`` on, at piece ends; parts of a piece in order."""
        place, end = start, start + flat.numel()
        while place < end:
            turn, rest = divmod(place, self.period)
            left = flat[place - start :]
            if not rest and left.numel() >= self.period:
                block = left[: left.numel() // self.period * self.period].view(-1, len(self.pieces), self.width)
                for shard in range(len(self.pieces)):
                    yield from self._of_shard(shard, turn * self.width, block[:, shard])
                place += block.numel()
            else:
                shard, inside = divmod(rest, self.width)
                run = left[: self.width - inside].view(1, -1)
                yield from self._of_shard(shard, turn * self.width + inside, run)
                place += run.numel()

    def _of_shard(self, shard: int, first: int, rows: Tensor) -> Iterator[Part]:
        """Cut consecutive elements of a shard, [rows, columns], at the ends of pieces."""
        starts, place, end = self._starts[shard], first, first + rows.numel()
        number = bisect_right(starts, first) - 1
        while place < end:
            stop = min(end, starts[number + 1])
            for part in _runs(rows, place - first, stop - first):
                yield self._numbers[shard] + number, place - starts[number], part
                place += part.numel()
            number += 1

    def place(self, piece: int, element: int) -> int:
        """Flat index in the whole tensor of an element of a piece; ascends with ``element``."""
        shard = bisect_right(self._numbers, piece) - 1
        turn, inside = divmod(self._starts[shard][piece - self._numbers[shard]] + element, self.width)
        return turn * self.period + shard * self.width + inside


def _runs(rows: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield elements ``start`` to ``stop`` of [rows, columns] in row-major order, as views."""
    columns = rows.shape[1]
    while start < stop:
        row, column = divmod(start, columns)
        if not column and stop - start >= columns:
            found = rows[row : row + (stop - start) // columns]
        else:
            found = rows[row, column : min(columns, column + stop - start)]
        yield found
        start += found.numel()


@dataclass(frozen=True)
class OpenCopy:
    """A copy whose pieces were located and have the expected shapes and types; ``sources`` are flat."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    arrangement: Places
    sources: Sequence[Extent | Tensor]

    def ranges(self, num_bytes: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut elements ``start`` up to ``stop`` into ranges of at most ``num_bytes``, at row ends if a row fits.

        ``num_bytes`` must be at least the size of an element; ``stop`` is one past the last.
        """
        row = max(1, prod(self.shape[1:]))
        size = num_bytes // self.dtype.itemsize
        size -= size % row if row <= size else 0
        for place in range(start, stop, size):
            yield place, min(place + size, stop)

    def fill(self, start: int, out: Tensor, reader: ExtentReader) -> None:
        """Read a range of the whole tensor, from place ``start`` on, into ``out``, [n] and contiguous.

        ``reader`` must be this thread's; errors as in ``ExtentReader.read``.
        """
        for number, first, part in self.arrangement.cut(start, out):
            source = self.sources[number]
            if isinstance(source, Tensor):
                part.copy_(source[first : first + part.numel()].view(part.shape))
            elif part.is_contiguous():
                reader.read(source, first, part.view(-1))
            else:
                run = part.new_empty(part.numel())
                reader.read(source, first, run)
                part.copy_(run.view(part.shape))
