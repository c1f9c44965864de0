"""A sum over replicas in fp64, and how far rounding may take the reduction's own from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megasdc.sdc.fp64.rounding_bounds import Exact, gamma


def mean_of(parts: Sequence[Tensor], factor: float, kind: torch.dtype, *, converted: bool = False) -> Exact:
    """The mean of the replicas' gradients, times a factor.

    A reduction adds N parts in any order, N - 1 roundings for each at most; it divides before or after, by a factor
    that is rounded itself unless N is a power of two; the factor, unless it is 1, costs a rounding of itself and one of
    the product. Each rounding is one of ``kind``; a quotient below its smallest normal number may be flushed to zero.

    Args:
        parts: of each replica, [n].
        kind: the coarsest type on the way.
        converted: whether parts are sent in another type than theirs: one more rounding of each.
    """
    count = len(parts)
    stacked = torch.stack([one.double() for one in parts])
    exact = count & (count - 1) == 0
    roundings = count - 1 + (0 if exact else 2) + (0 if factor == 1.0 else 2) + int(converted)
    values = stacked.sum(0) * (factor / count)
    sizes = stacked.abs().sum(0) * (abs(factor) / count)
    tiny = torch.finfo(kind).tiny
    bounds = (gamma(roundings, kind) + gamma(4 * count, torch.float64)) * sizes + 2 * count * tiny
    return Exact(values, torch.where(sizes < torch.finfo(kind).max / (2 * count), bounds, torch.inf))
