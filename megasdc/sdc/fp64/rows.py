"""Checks of the rows of a product: the sum of each row against what the factors say, without computing it again.

Of ``Y = A B^T`` the sum of row r is ``a_r . s`` with ``s`` the sum of B's rows (Huang and Abraham 1984, Algorithm-Based
Fault Tolerance for Matrix Operations). That takes two products of a matrix and a vector instead of one of two matrices.

The roundings of a row's elements are taken as independent: that of an element has at most about the standard deviation
``u |a_r| |b_c|``, with u the unit roundoff of the sums, since each of K roundings is of a partial sum of about
``|a_r| |b_c| / sqrt(K)``; to this comes ``u' |y_rc|`` for the type of the result. A row is suspicious where its sum is
off by more than ``LIMIT`` standard deviations. This is no proof, and names nobody: elements of the row outside of
their proven bound do (``megasdc.sdc.fp64.rounding_bounds.product``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.fp64.referee import is_within
from megasdc.sdc.fp64.rounding_bounds import WORKING, product
from megasdc.sdc.incident import Outside

LIMIT = 8.0
"""Standard deviations that a sum may be off."""
BLOCK = 64
"""Terms that are added up in fp32 before they are added in fp64: fast, and exact enough."""
ELEMENTS = 1 << 22
"""Products of two numbers that are computed in fp64 at a time."""


def suspicion(left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor) -> Tensor:
    """How far the sum of each row of ``left right^T + bias`` is off, over what rounding makes likely.

    Args:
        left: [R, K], as the device had it.
        right: [C, K].
        bias: [C]; None: nothing is added.
        result: [R, C].

    Returns:
        [R], fp64; above 1: suspicious; NaN where the result, or what it was made of, is not finite.
    """
    columns, terms = right.shape
    expected = left.double() @ _sum_of_rows(right)
    if bias is not None:
        expected = expected + bias.double().sum()
    off = (_sum_of_rows(result.T) - expected).abs()
    roundoff, own = torch.finfo(WORKING).eps / 2, torch.finfo(result.dtype).eps / 2
    of_sums = roundoff**2 * (1 + BLOCK / terms) * _squares(left, -1) * _squares(right, None)
    of_results = (BLOCK * roundoff**2 + own**2) * _squares(result, -1)
    least = columns * terms * torch.finfo(WORKING).tiny
    return off / (LIMIT * (of_sums + of_results).sqrt() + least)


def worst_element(left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor, row: int) -> Outside | None:
    """The element of a row of ``result`` farthest outside of what rounding allows; None: none is outside.

    Args:
        left, right, bias, result: as for ``suspicion``.
    """
    factor, worst, farthest = left[row].cpu(), None, 0.0
    step = max(1, ELEMENTS // factor.numel())
    for start in range(0, result.shape[1], step):
        part = slice(start, start + step)
        others = right[part].cpu()
        got = result[row, part].cpu()
        exact = product(factor.expand(len(others), -1), others, got.dtype, None if bias is None else bias[part].cpu())
        outside = ~is_within(got.double(), exact)
        distance = ((got.double() - exact.values).abs() / exact.bounds).nan_to_num(nan=torch.inf)
        distance = torch.where(outside, distance, 0.0)
        place = int(distance.argmax())
        if distance[place] > farthest:
            farthest = distance[place].item()
            values = exact.values[place].item(), exact.bounds[place].item()
            worst = Outside((row, start + place), *values, {0: repr(got[place].item())})
    return worst


def _sum_of_rows(matrix: Tensor) -> Tensor:
    """The sum over the first dimension, [n, m] to [m], fp64."""
    whole = len(matrix) // BLOCK * BLOCK
    blocks = matrix[:whole].unflatten(0, (-1, BLOCK)).sum(1, dtype=WORKING)
    return blocks.double().sum(0) + matrix[whole:].double().sum(0)


def _squares(matrix: Tensor, dim: int | None) -> Tensor:
    """Squared norm of each row, or of all."""
    if dim is not None and matrix.stride(-1) != 1:  # a transposed one: its columns are added up within the cache
        return torch.stack([part.to(WORKING).square().sum(0) for part in matrix.T.split(BLOCK)]).sum(0).double()
    return torch.linalg.vector_norm(matrix, dim=dim, dtype=WORKING).double().square()
