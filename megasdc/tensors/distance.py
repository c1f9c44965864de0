"""Distance of two tensors: norm of the difference over that of the reference, and number of differing elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasdc.tensors.bits import as_bits

_BLOCK = 1 << 22


@dataclass
class Distance:
    """Distance of some parameters from the reference.

    Attributes:
        squares: sum of (theta - theta_ref)^2 over the elements that differ in some bit.
        reference: sum of theta_ref^2.
        num_different: elements that differ in some bit.
    """

    squares: float = 0.0
    reference: float = 0.0
    num_different: int = 0
    numel: int = 0

    @property
    def equal(self) -> bool:
        """Whether every bit is equal."""
        return self.num_different == 0

    @property
    def relative(self) -> float:
        """||theta - theta_ref|| / ||theta_ref||; 0 where every bit is equal; NaN with NaN or infinities."""
        if self.equal:
            return 0.0
        if self.reference == 0:
            return math.inf if self.squares else 0.0
        return math.sqrt(self.squares / self.reference)

    def add(self, other: Distance) -> None:
        """Add the counts of further parameters."""
        self.squares += other.squares
        self.reference += other.reference
        self.num_different += other.num_different
        self.numel += other.numel

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        norms = {"difference_norm": math.sqrt(self.squares), "reference_norm": math.sqrt(self.reference)}
        numbers = {"relative": self.relative, **norms}
        return {
            "equal": self.equal,
            **{name: value if math.isfinite(value) else str(value) for name, value in numbers.items()},
            "num_different": self.num_different,
            "numel": self.numel,
        }


def distance(got: Tensor, reference: Tensor) -> Distance:
    """Distance of two tensors of one shape, block by block in float64.

    Types may differ; elements then differ if their values do.
    """
    found = Distance(numel=got.numel())
    for x, y in _blocks(got.reshape(-1), reference.reshape(-1)):
        wide = y.to(torch.float64)
        found.reference += float(wide.square().sum())
        differs = as_bits(x) != as_bits(y) if x.dtype == y.dtype else x.to(torch.float64) != wide
        count = int(differs.sum())
        if count:
            found.num_different += count
            found.squares += float((x[differs].to(torch.float64) - wide[differs]).square().sum())
    return found


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, a.numel(), _BLOCK):
        yield a[start : start + _BLOCK], b[start : start + _BLOCK]
