"""Elements of a result in fp64, and how far rounding may take the device's own from them.

A sum of K terms is computed in a type with unit roundoff u, in any order, with or without fused multiply-add. Each term
passes through at most K roundings, its product included, so that the computed sum differs from the exact one by at most
(Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1)

    gamma_K(u) S,    gamma_K(u) = K u / (1 - K u),    S = sum of the magnitudes of all terms.

To this come: roundings to the type of the result; products that underflow, each at most the smallest normal number,
where devices flush those to zero; terms with an operand below it, which some units take for 0 (AMX: Intel SDM,
TDPBF16PS); and the same bound of the fp64 sum itself. ``docs/design/referee.md`` has the proofs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORKING = torch.float32
"""Type in which results of 32 bits and less are computed, unless another one is said."""


@dataclass(frozen=True)
class Exact:
    """Elements computed in fp64.

    Args:
        values: [n].
        bounds: [n], largest difference that rounding explains; infinite where the type may overflow on the way.
    """

    values: Tensor
    bounds: Tensor


def product(
    left: Tensor, right: Tensor, kind: torch.dtype, bias: Tensor | None = None, working: torch.dtype = WORKING
) -> Exact:
    """Elements of a product of matrices, one from each pair of rows.

    Args:
        left: [n, K], as the device had it.
        right: [n, K].
        kind: type of the result.
        bias: [n], added to the result in its own type; None: nothing is.
        working: type that products are added in.
    """
    left, right = left.double(), right.double()
    terms = left * right
    counts = (terms != 0).sum(-1)  # a term that is 0 is added without a rounding
    sizes, values = terms.abs().sum(-1), terms.sum(-1)
    smallest = torch.finfo(working).tiny
    dropped = torch.where((left.abs() < smallest) | (right.abs() < smallest), terms.abs(), 0.0).sum(-1)
    bounds = _gamma(counts, working) * sizes + 2 * counts * smallest + dropped
    bounds = rounded(bounds, values, kind)
    if bias is not None:
        values = values + bias.double()
        bounds = rounded(bounds, values, kind)
    return _finite(values, bounds, sizes, terms.shape[-1], kind)


def residual(
    branch: Tensor, bias: Tensor | None, mask: Tensor | None, other: Tensor | None, kind: torch.dtype
) -> Exact:
    """Elements of ``other + mask (branch + bias)``, each [n]; without what is None."""
    values, sizes = branch.double(), branch.double().abs()
    bounds = torch.zeros_like(values)
    if bias is not None:
        values, sizes = values + bias.double(), sizes + bias.double().abs()
        bounds = rounded(bounds, values, kind)
    if mask is not None:
        values, sizes, bounds = values * mask.double(), sizes * mask.double(), bounds * mask.double()
        bounds = rounded(bounds, values, kind)
    if other is not None:
        values, sizes = values + other.double(), sizes + other.double().abs()
        bounds = rounded(bounds, values, kind)
    return _finite(values, bounds, sizes, 3, kind)


def normalized(
    rows: Tensor, columns: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: torch.dtype, *, centred: bool
) -> Exact:
    """Elements of a LayerNorm, or of an RMSNorm where it is not centred.

    The variance may be computed in one pass or two, or updated with each element: its error is at most four times
    gamma_(K+2) of the mean square.

    Args:
        rows: [n, K], the input's rows that the elements belong to.
        columns: [n], their places in these.
        weight: [n], and bias, of their columns.
    """
    rows = rows.double()
    count, roundoff = rows.shape[-1], torch.finfo(WORKING).eps / 2
    own = rows.gather(-1, columns[:, None])[:, 0]
    squares = rows.square().mean(-1)
    mean = rows.mean(-1) if centred else torch.zeros_like(own)
    mean_off = _gamma(count + 1, WORKING) * rows.abs().mean(-1) if centred else torch.zeros_like(own)
    variance = (rows - mean[:, None]).square().mean(-1)
    variance_off = 4 * _gamma(count + 2, WORKING) * squares + 2 * mean.abs() * mean_off + mean_off.square()
    share = variance_off / (variance + eps) + 2 * roundoff
    factor = (variance + eps).rsqrt()
    factor_off = factor * torch.where(share < 0.5, share / (1 - share) + 4 * roundoff, torch.inf)
    scale = weight.double()
    values = (own - mean) * factor * scale
    reach = (own.abs() + mean.abs()) * factor * scale.abs()
    bounds = scale.abs() * ((own - mean).abs() * factor_off + (factor + factor_off) * mean_off) + 8 * roundoff * reach
    bounds = rounded(rounded(bounds, values, kind), values, kind)  # some round before they multiply with the weight
    if bias is not None:
        values = values + bias.double()
        bounds = rounded(bounds, values, kind) + 2 * roundoff * values.abs()
    return _finite(values, bounds, reach + values.abs(), count, kind)


def chosen(values: Tensor) -> Exact:
    """Elements that are copied: no rounding is allowed."""
    return Exact(values.double(), torch.zeros(len(values), dtype=torch.float64))


def rounded(bounds: Tensor, values: Tensor, kind: torch.dtype) -> Tensor:
    """The bound after one more rounding to a type, or one more operation in it."""
    info = torch.finfo(kind)
    return bounds + info.eps / 2 * (values.abs() + bounds) + info.tiny


def _gamma(count: Tensor | int, kind: torch.dtype) -> Tensor:
    product = torch.as_tensor(count, dtype=torch.float64) * torch.finfo(kind).eps / 2
    return torch.where(product < 0.5, product / (1 - product), torch.inf)


def _finite(values: Tensor, bounds: Tensor, sizes: Tensor, count: int, kind: torch.dtype) -> Exact:
    """With the rounding of fp64; without a bound where a type may overflow, or was not finite before."""
    bounds = bounds + _gamma(4 * count + 4, torch.float64) * (sizes + values.abs())
    largest = min(torch.finfo(WORKING).max, torch.finfo(kind).max)
    return Exact(values, torch.where(sizes + values.abs() + bounds < largest, bounds, torch.inf))
