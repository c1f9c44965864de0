"""Index arithmetic of rectangular blocks of a tensor: from an element of a block to its offset in the whole tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from megasdc.checkpoint.formats.open_copy import Part


@dataclass(frozen=True)
class TensorBlock:
    """A rectangular block of a tensor; its elements are stored row-major within the block.

    ``offsets``: index of its first element, by dimension; ``sizes``: its shape; ``shape``: the whole tensor's.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @cached_property
    def run(self) -> int:
        """Length of a run: elements that are contiguous in the whole tensor too."""
        numel = 1
        for size, whole in zip(reversed(self.sizes), reversed(self.shape), strict=True):
            numel *= size
            if size != whole:
                break
        return numel

    @property
    def num_runs(self) -> int:
        """Number of such runs in the block."""
        return prod(self.sizes) // self.run if self.run else 0

    def run_place(self, run: int) -> int:
        """Flat index in the whole tensor of a run's first element."""
        return self.place(run * self.run)

    def place(self, element: int) -> int:
        """Flat index in the whole tensor of one of the block's elements; ascends with ``element``."""
        found, stride = 0, 1
        for offset, size, whole in zip(*(reversed(one) for one in (self.offsets, self.sizes, self.shape)), strict=True):
            element, rest = divmod(element, size)
            found += (offset + rest) * stride
            stride *= whole
        return found


@dataclass(frozen=True)
class BlockArrangement:
    """A tensor that is divided into blocks, one for each piece."""

    blocks: tuple[TensorBlock, ...]

    def cut(self, start: int, flat: Tensor) -> Iterator[Part]:
        """Cut a range of the whole tensor into what pieces hold; see ``Arrangement.cut``."""
        end = start + flat.numel()
        for number, block in enumerate(self.blocks):
            runs = range(block.num_runs)
            first = bisect_right(runs, start, key=block.run_place) - 1
            for run in runs[max(0, first) :]:
                place = block.run_place(run)
                if place >= end:
                    break
                low, high = max(start, place), min(end, place + block.run)
                if low < high:
                    yield number, run * block.run + low - place, flat[low - start : high - start]

    def place(self, piece: int, element: int) -> int:
        """Flat index in the whole tensor of an element of a piece; ascends with ``element``."""
        return self.blocks[piece].place(element)
