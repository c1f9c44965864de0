"""Referee: which of two results of a product of matrices is wrong, by the bound of its rounding; nobody is guessed.

An element is a sum of K products. It is computed again in fp64, and a result further from that than rounding can
explain is wrong. Of K numbers that are multiplied and added in a type with unit roundoff u, in any order, with or
without fused multiply-add, each term passes through at most K roundings, so that the computed sum differs from the
exact one by at most (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1)

    gamma_K(u) S,    gamma_K(u) = K u / (1 - K u),    S = sum of |x_k w_k|.

To this come: one rounding of the result to its own type; a bias, added in that type; products that underflow, each at
most the smallest normal number, where devices flush those to zero; terms with an operand below it, which some units
take for 0 (AMX, Intel SDM, TDPBF16PS); and the same bound of the fp64 sum itself. ``docs/design/referee.md`` has the
proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORKING = torch.float32
"""Type of sums of products of 32 bits and less."""


@dataclass(frozen=True)
class Exact:
    """Elements computed in fp64.

    Args:
        values: [n].
        bounds: [n], largest difference that rounding explains; infinite where the type may overflow on the way.
    """

    values: Tensor
    bounds: Tensor


def product(left: Tensor, right: Tensor, kind: torch.dtype, bias: Tensor | None = None) -> Exact:
    """Elements of a product of matrices, one from each pair of rows.

    Args:
        left: [n, K], as the device had it.
        right: [n, K].
        kind: type of the result.
        bias: [n], added to the result in its own type; None: nothing is.
    """
    left, right = left.double(), right.double()
    terms, count = left * right, left.shape[-1]
    sizes = terms.abs().sum(-1)
    values = terms.sum(-1)
    smallest = torch.finfo(WORKING).tiny
    dropped = torch.where((left.abs() < smallest) | (right.abs() < smallest), terms.abs(), 0.0).sum(-1)
    bounds = _gamma(count, WORKING) * sizes + 2 * count * smallest + dropped
    bounds = _rounded(bounds, values, kind)
    if bias is not None:
        values = values + bias.double()
        bounds = _rounded(bounds, values, kind)
    bounds = bounds + _gamma(count + 1, torch.float64) * (sizes + values.abs())
    largest = min(torch.finfo(WORKING).max, torch.finfo(kind).max)
    return Exact(values, torch.where(sizes + values.abs() + bounds < largest, bounds, torch.inf))


def _gamma(count: int, kind: torch.dtype) -> float:
    roundoff = torch.finfo(kind).eps / 2
    return count * roundoff / (1 - count * roundoff)


def _rounded(bounds: Tensor, values: Tensor, kind: torch.dtype) -> Tensor:
    """The bound after one more rounding to a type, or one more sum in it."""
    info = torch.finfo(kind)
    return bounds + info.eps / 2 * (values.abs() + bounds) + info.tiny


def judge(results: Mapping[int, Tensor], exact: Exact) -> dict[int, bool]:
    """Whether the results of each rank are what rounding allows.

    Args:
        results: by rank, [n]; elements in which ranks differ.

    Returns:
        True: all are within the bound. False: some are not, or are NaN or Inf, and another rank's all are within: the
        rank is wrong for certain. Empty: none is outside, so that any may be right; or all are, so that the elements
        are not what the referee takes them for.
    """
    found = {rank: bool(_is_within(values.double(), exact).all()) for rank, values in results.items()}
    return found if len(set(found.values())) == 2 else {}


def _is_within(values: Tensor, exact: Exact) -> Tensor:
    inside = (values - exact.values).abs() <= exact.bounds  # NaN is not
    return inside | exact.bounds.isinf()


def agreed(found: Sequence[Exact]) -> Exact | None:
    """What several ranks have computed of the same elements, if their bits are equal; else None: one is not right."""
    first = found[0]
    same = all(torch.equal(one.values, first.values) and torch.equal(one.bounds, first.bounds) for one in found)
    return first if same else None
