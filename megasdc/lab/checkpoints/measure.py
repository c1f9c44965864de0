"""Size of the difference between two tensors, accumulated range by range, so that neither is held in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megasdc.tensors.bits import as_bits, count_flips, ulp_distance


@dataclass(frozen=True)
class Measure:
    """Difference between two tensors of one data type and shape.

    Attributes:
        first: index of the first that differs.
        last: index of the last.
        max_ulp: largest distance in representable values; None: not a floating-point type, or a NaN against another
            value.
        max_relative: largest |a - b| / max(|a|, |b|) over finite pairs; infinite if some pair is not finite.
        mean_relative: mean of the same over the finite pairs that differ.
        norms: Euclidean norms of the expected and the found tensor.
        num_nan: NaN elements in each.
        num_inf: infinite elements in each.
        dtype: data type of both, such as ``float32``.
        flips: number of elements in which each bit differs, lowest bit first.
    """

    num_different: int
    numel: int
    first: list[int]
    last: list[int]
    max_ulp: int | None
    max_relative: float
    mean_relative: float
    norms: tuple[float, float]
    num_nan: tuple[int, int]
    num_inf: tuple[int, int]
    dtype: str
    flips: list[int]


@dataclass
class Measuring:
    """Accumulates a ``Measure`` of two tensors of one shape that are passed range by range."""

    shape: tuple[int, ...]
    _numel: int = 0
    _count: int = 0
    _ends: list[int] = field(default_factory=list)
    _ulp: int | None = None
    _largest: float = 0.0
    _sum: float = 0.0
    _num_finite: int = 0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _nan: list[int] = field(default_factory=lambda: [0, 0])
    _inf: list[int] = field(default_factory=lambda: [0, 0])
    _flips: list[int] = field(default_factory=list)
    _dtype: torch.dtype | None = None

    def add(self, expected: Tensor, got: Tensor) -> None:
        """Add the next elements of both, [n]."""
        wide = (expected.to(torch.float64), got.to(torch.float64))
        for side, values in enumerate(wide):
            self._squares[side] += float(values.square().sum())
            self._nan[side] += int(values.isnan().sum())
            self._inf[side] += int(values.isinf().sum())
        places = (as_bits(expected) != as_bits(got)).nonzero().view(-1)
        if places.numel():
            self._ends = [self._ends[0] if self._ends else self._numel + int(places[0]), self._numel + int(places[-1])]
            self._count += places.numel()
            flips = count_flips(expected[places], got[places])
            self._flips = [old + new for old, new in zip(self._flips or [0] * len(flips), flips, strict=True)]
            if got.dtype.is_floating_point:
                self._ulp = max(self._ulp or 0, int(ulp_distance(expected[places], got[places]).max()))
            self._add_relative(wide[0][places], wide[1][places])
        self._numel += got.numel()
        self._dtype = got.dtype

    def _add_relative(self, one: Tensor, other: Tensor) -> None:
        finite = one.isfinite() & other.isfinite()
        scale = torch.maximum(one.abs(), other.abs())
        relative = torch.where(scale > 0, (one - other).abs() / scale, 0.0)[finite]
        if relative.numel():
            self._largest, self._sum = max(self._largest, float(relative.max())), self._sum + float(relative.sum())
            self._num_finite += relative.numel()
        if not bool(finite.all()):
            self._largest = math.inf

    def result(self) -> Measure:
        """The measure after all elements; requires that at least one differs."""
        first, last = (unravel(end, self.shape) for end in self._ends)
        return Measure(
            num_different=self._count,
            numel=self._numel,
            first=first,
            last=last,
            max_ulp=self._ulp if self._ulp is None or self._ulp < torch.iinfo(torch.int64).max else None,
            max_relative=self._largest,
            mean_relative=self._sum / self._num_finite if self._num_finite else 0.0,
            norms=(math.sqrt(self._squares[0]), math.sqrt(self._squares[1])),
            num_nan=(self._nan[0], self._nan[1]),
            num_inf=(self._inf[0], self._inf[1]),
            dtype=str(self._dtype).removeprefix("torch."),
            flips=self._flips,
        )


def unravel(place: int, shape: tuple[int, ...]) -> list[int]:
    """Multi-dimensional index of an element, from its flat row-major index."""
    index = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return index[::-1]
