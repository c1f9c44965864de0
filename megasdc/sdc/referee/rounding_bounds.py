"""Elements of a result in fp64, and how far rounding may take the device's own from them.

A sum of K terms is computed in a type with unit roundoff u, in any order, with or without fused multiply-add. Each term
passes through at most K roundings, its product included, so that the computed sum differs from the exact one by at most
(Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1)

    gamma_K(u) S,    gamma_K(u) = K u / (1 - K u),    S = sum of the magnitudes of all terms.

To this come: roundings to the type of the result; products that underflow, each at most the smallest normal number,
where devices flush those to zero; terms with an operand below it, which some units take for 0 (AMX: Intel SDM,
TDPBF16PS); and the same bound of the fp64 sum itself. ``docs/design/referee.md`` has the proofs.

Products, norms, activations, sums over replicas, losses and gradients of logits have a function each. The loss of a
token is ``log(sum of exp(z_c - m)) + m - z_t`` for any m, the gradient of logit c is the slope times ``exp(z_c - m) /
sum - [c = t]``. A device computes both in fp32, whatever the type of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORKING = torch.float32
"""Type in which results of 32 bits and less are computed, unless another one is said."""
STEEPEST = 1.13
"""Largest magnitude of the derivative of GELU (1.129), SiLU (1.100) and ReLU (1)."""
CURVED = 0.9
"""Largest magnitude of the second derivative of GELU (0.798), also by tanh, and SiLU (0.5); ReLU has none at 0."""
INACCURACY = 2.0**-20
"""Largest absolute error that is allowed to a device's erf, tanh and logistic function in fp32; the fast ones of vector
libraries have up to 2 ** -21."""


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
    bounds = gamma(counts, working) * sizes + 2 * counts * smallest + dropped
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


@dataclass(frozen=True)
class NormMoments:
    """What a norm takes from each row, and how far rounding may take the device's own from it; all [..., 1].

    Args:
        mean: 0 for an RMSNorm.
        factor: one over the root of the variance, or of the mean square, and eps.
        steps: type that each operation of the norm has its result in; sums are added up in ``WORKING``.
    """

    mean: Tensor
    mean_off: Tensor
    factor: Tensor
    factor_off: Tensor
    steps: torch.dtype = WORKING

    @classmethod
    def of(cls, rows: Tensor, eps: float, *, centred: bool, steps: torch.dtype = WORKING) -> NormMoments:
        """Those of rows, [..., K]; of a LayerNorm where they are centred.

        The variance may be computed in one pass or two, or updated with each element: its error is at most four times
        gamma_(K+2) of the mean square. Where operations round to a narrower type, so are squares, mean and difference:
        at most eight roundings of the mean square.
        """
        rows, count = rows.double(), rows.shape[-1]
        squares = rows.square().mean(-1, keepdim=True)
        mean, mean_off = torch.zeros_like(squares), torch.zeros_like(squares)
        if centred:
            mean = rows.mean(-1, keepdim=True)
            mean_off = gamma(count + 1, WORKING) * rows.abs().mean(-1, keepdim=True)
            mean_off = mean_off if steps == WORKING else rounded(mean_off, mean, steps)
        variance = (rows - mean).square().mean(-1, keepdim=True)
        off = 4 * gamma(count + 2, WORKING) * squares + 2 * mean.abs() * mean_off + mean_off.square()
        roundoff = torch.finfo(steps).eps / 2
        off = off if steps == WORKING else off + 8 * roundoff * squares
        share = off / (variance + eps) + 2 * roundoff
        factor = (variance + eps).rsqrt()
        factor_off = factor * torch.where(share < 0.5, share / (1 - share) + 4 * roundoff, torch.inf)
        return cls(mean, mean_off, factor, factor_off, steps)

    def stored(self, kind: torch.dtype) -> NormMoments:
        """As a backward pass has them, which some devices keep in the type of the result."""
        mean_off = rounded(self.mean_off, self.mean, kind)
        return replace(self, mean_off=mean_off, factor_off=rounded(self.factor_off, self.factor, kind))


def normalized(
    own: Tensor, moments: NormMoments, weight: Tensor, bias: Tensor | None, kind: torch.dtype, count: int
) -> Exact:
    """Elements of a norm.

    Args:
        own: elements of the input, [n].
        moments: of their rows, [n, 1].
        weight: of their columns, [n], and bias.
        count: elements of a row.
    """
    values, bounds, reach = _normalized(own.double()[:, None], moments, weight.double()[:, None], kind)
    values, bounds, reach = values[:, 0], bounds[:, 0], reach[:, 0]
    if bias is not None:
        values = values + bias.double()
        bounds = rounded(bounds, values, kind) + torch.finfo(moments.steps).eps * values.abs()
    return _finite(values, bounds, reach + values.abs(), count, kind)


def _normalized(own: Tensor, moments: NormMoments, scale: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, bounds, and the magnitude of their terms, of ``(own - mean) factor scale``."""
    values = (own - moments.mean) * moments.factor * scale
    reach = (own.abs() + moments.mean.abs()) * moments.factor * scale.abs()
    off = (own - moments.mean).abs() * moments.factor_off + (moments.factor + moments.factor_off) * moments.mean_off
    bounds = scale.abs() * off + 4 * torch.finfo(moments.steps).eps * reach
    return values, rounded(rounded(bounds, values, kind), values, kind), reach  # some round before they scale


def norm_weight(
    gradient: Tensor,
    own: Tensor,
    moments: NormMoments,
    kind: torch.dtype,
    width: int,
    working: torch.dtype = WORKING,
) -> Exact:
    """Elements of the gradient of a norm's weight: sums over tokens of the gradient times the normalised element.

    Args:
        gradient: of the output, [n, T], each element's column.
        own: elements of the input, likewise.
        moments: of the T rows, [T, 1].
        width: elements of a row.
        working: type that tokens are summed in.
    """
    gradient = gradient.double()
    turned = moments.mean.T, moments.mean_off.T, moments.factor.T, moments.factor_off.T
    across = NormMoments(*turned, steps=moments.steps)
    unit, off, _ = _normalized(own.double(), across.stored(kind), torch.ones((), dtype=torch.float64), kind)
    sizes = (gradient.abs() * (unit.abs() + off)).sum(-1)
    tokens = gradient.shape[-1]
    bounds = (gradient.abs() * off).sum(-1) + gamma(tokens + 1, working) * sizes
    bounds = bounds + 2 * tokens * torch.finfo(working).tiny
    values = (gradient * unit).sum(-1)
    return _finite(values, rounded(bounds, values, kind), sizes, tokens + width, kind)


def norm_input(
    gradient: Tensor,
    rows: Tensor,
    columns: Tensor,
    moments: NormMoments,
    weight: Tensor,
    kind: torch.dtype,
    *,
    centred: bool,
) -> Exact:
    """Elements of the gradient of a norm's input, ``f h - f sum(h) / K - f^3 (x - mean) sum(h (x - mean)) / K``.

    ``h`` is the gradient of the output times the weight, ``f`` the factor; the second term is a LayerNorm's. Devices
    also add up ``h x`` and ``h mean`` apart, so that the bound is by magnitudes of these.

    Args:
        gradient: of the output, [n, K], each element's row.
        rows: of the input, [n, K].
        columns: places of the elements in these, [n].
        moments: of the rows, [n, 1].
        weight: [K].
    """
    count, at, moments = rows.shape[-1], columns[:, None], moments.stored(kind)
    rows, scaled = rows.double(), gradient.double() * weight.double()
    mean, factor = moments.mean, moments.factor
    cubed = factor**3 / count
    sums = scaled.sum(-1, keepdim=True) * centred
    moved = (scaled * (rows - mean)).sum(-1, keepdim=True)
    own, here = rows.gather(-1, at), scaled.gather(-1, at)
    values = factor * (here - sums / count) - cubed * (own - mean) * moved
    reach = rows.abs() + mean.abs()
    all_h, all_hx = scaled.abs().sum(-1, keepdim=True), (scaled.abs() * reach).sum(-1, keepdim=True)
    first = factor * (here.abs() + all_h / count)
    second = cubed * reach.gather(-1, at) * all_hx
    share = moments.factor_off / factor
    steps = 0.0 if moments.steps == WORKING else 12 * torch.finfo(moments.steps).eps
    bounds = (first + second) * (gamma(count + 12, WORKING) + 2 * torch.finfo(kind).eps + steps)
    bounds = bounds + share * (1 + share) ** 2 * (first + 3 * second)
    bounds = bounds + 2 * moments.mean_off * cubed * (all_hx + reach.gather(-1, at) * all_h) * (1 + share) ** 3
    values, bounds = values[:, 0], rounded(bounds[:, 0], values[:, 0], kind)
    return _finite(values, bounds, (first + second)[:, 0], 2 * count, kind)


def activated(
    function: Callable[[Tensor], Tensor],
    gate: Tensor,
    bias: Tensor | None,
    linear: tuple[Tensor, Tensor | None] | None,
    kind: torch.dtype,
    *,
    clamp: float | None = None,
    offset: float = 0.0,
) -> Exact:
    """Elements of ``function(gate + bias)``, times ``linear + its bias + offset`` where that is given.

    Args:
        function: GELU, SiLU or ReLU: no steeper than ``STEEPEST``, and of no larger magnitude than its argument.
        gate: [n]; bias, linear and its bias too.
        clamp: bounds the argument from above, and the other factor on both sides; None: nothing does. A device may have
            it, and the offset, in its own type.
    """
    place, off = _clamped(residual(gate, bias, None, None, kind), -torch.inf, clamp, kind)
    values = function(place)
    bounds = STEEPEST * off + INACCURACY * place.abs() + 2 * torch.finfo(WORKING).eps * values.abs()
    bounds = rounded(bounds, values, kind)
    if linear is not None:
        least = -torch.inf if clamp is None else -clamp
        factor, apart = _clamped(residual(*linear, None, None, kind), least, clamp, kind)
        reach, factor = factor.abs(), factor + offset
        apart = rounded(apart + _storing(offset, kind), factor, kind)
        values, bounds = values * factor, bounds * (factor.abs() + apart) + values.abs() * apart
        bounds = rounded(bounds, values, kind)
        return _finite(values, bounds, (reach + abs(offset)) * place.abs(), 3, kind)
    return _finite(values, bounds, place.abs(), 3, kind)


def activated_input(
    function: Callable[[Tensor], Tensor],
    slope: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    linear: tuple[Tensor, Tensor | None] | None,
    kind: torch.dtype,
    *,
    steps: bool = False,
) -> Exact:
    """Elements of the gradient of ``gate`` in ``function(gate + bias)``, times ``linear + its bias`` where it is given.

    Args:
        function: as for ``activated``; its derivative is no steeper than ``CURVED``.
        slope: gradient of the result, [n]; the others as for ``activated``.
        steps: the function is ReLU, whose derivative is a step.
    """
    given = residual(gate, bias, None, None, kind)
    place, off = given.values, given.bounds
    leaf = place.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(function(leaf).sum(), leaf)
    magnitude = place.abs()
    apart = CURVED * off + INACCURACY * (4 + magnitude + magnitude**3)
    if steps:
        apart = torch.where(magnitude <= off, 1.0, 0.0)
    factor = slope.double()
    factor_off = torch.zeros_like(factor)
    if linear is not None:
        other = residual(*linear, None, None, kind)
        factor, factor_off = factor * other.values, factor.abs() * other.bounds
        factor_off = rounded(factor_off, factor, kind)
    values = factor * derivative
    bounds = factor_off * (derivative.abs() + apart) + factor.abs() * apart
    bounds = rounded(rounded(bounds + 4 * torch.finfo(WORKING).eps * values.abs(), values, kind), values, kind)
    return _finite(values, bounds, (factor.abs() + factor_off) * (1 + magnitude), 4, kind)


def _clamped(given: Exact, least: float, most: float | None, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and bounds between two limits, of one magnitude where both are finite; ``most``: None for no limit."""
    if most is None:
        return given.values, given.bounds
    off = _storing(most, kind)
    reaches = (given.values + given.bounds >= most - off) | (given.values - given.bounds <= least + off)
    return given.values.clamp(least, most), given.bounds + torch.where(reaches, off, 0.0)


def _storing(number: float, kind: torch.dtype) -> float:
    """How far a number is moved where it is stored in a type."""
    return abs(torch.tensor(number, dtype=torch.float64).to(kind).item() - number)


def chosen(values: Tensor) -> Exact:
    """Elements that are copied: no rounding is allowed."""
    return Exact(values.double(), torch.zeros(len(values), dtype=torch.float64))


def rounded(bounds: Tensor, values: Tensor, kind: torch.dtype) -> Tensor:
    """The bound after one more rounding to a type, or one more operation in it."""
    info = torch.finfo(kind)
    return bounds + info.eps / 2 * (values.abs() + bounds) + info.tiny


def gamma(count: Tensor | int, kind: torch.dtype) -> Tensor:
    """Share that so many roundings to a type make at most; infinite where that says nothing."""
    product = torch.as_tensor(count, dtype=torch.float64) * torch.finfo(kind).eps / 2
    return torch.where(product < 0.5, product / (1 - product), torch.inf)


def _finite(values: Tensor, bounds: Tensor, sizes: Tensor, count: int, kind: torch.dtype) -> Exact:
    """With the rounding of fp64; without a bound where a type may overflow, or was not finite before."""
    bounds = bounds + gamma(4 * count + 4, torch.float64) * (sizes + values.abs())
    largest = min(torch.finfo(WORKING).max, torch.finfo(kind).max)
    return Exact(values, torch.where(sizes + values.abs() + bounds < largest, bounds, torch.inf))


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


ROUNDOFF = torch.finfo(WORKING).eps / 2


def token_losses_fp64(logits: Tensor, labels: Tensor) -> Exact:
    """Losses, [n], of logits [n, V] without padding, and labels [n]."""
    logits = logits.double()
    largest = logits.amax(-1)
    total, share, _, _ = _exponentials(logits, largest)
    own = logits.gather(-1, labels[:, None])[:, 0]
    values = total.log() + largest - own
    off = torch.log1p(share) + INACCURACY * (1 + total.log())
    off = off + 4 * ROUNDOFF * (total.log() + largest.abs() + own.abs() + values.abs())
    return _with(values, rounded(off, values, WORKING))


def logit_gradients(
    logits: Tensor, labels: Tensor, slopes: Tensor, rows: Tensor, columns: Tensor, kind: torch.dtype
) -> Exact:
    """Elements of the gradient, [n].

    Args:
        logits: [m, V] without padding.
        labels: [m].
        slopes: of the losses, [m].
        rows: which of these each element is of, [n].
        columns: its logit; from V on, padding, whose gradient is 0.
        kind: type of the gradient.
    """
    logits, slopes = logits.double(), slopes.double()
    total, share, exponentials, apart = _exponentials(logits, logits.amax(-1))
    real = columns < logits.shape[-1]
    place = rows, columns.clamp(max=logits.shape[-1] - 1)
    weight = exponentials[place] / total[rows]
    off = weight * ((1 + apart[place]) * (1 + share[rows]) - 1 + 4 * ROUNDOFF)
    label = (labels[rows] == columns).double()
    values = slopes[rows] * (weight - label)
    bounds = slopes[rows].abs() * (off + 4 * ROUNDOFF * (weight + label)) + torch.finfo(WORKING).tiny
    bounds = rounded(rounded(bounds, values, kind), values, kind)
    return _with(torch.where(real, values, 0.0), torch.where(real, bounds, 0.0))


def _exponentials(logits: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums, [m], the shares that they may be off by, the terms, [m, V], and the shares of these."""
    shifted = logits - largest[:, None]
    off = 2 * ROUNDOFF * (logits.abs() + largest.abs()[:, None]) + INACCURACY
    apart = torch.expm1(2 * off)
    terms = shifted.exp()
    total = terms.sum(-1)
    total_off = (terms * (apart + gamma(logits.shape[-1] + 2, WORKING))).sum(-1) / total
    return total, torch.where(total_off < 0.5, total_off / (1 - total_off), torch.inf), terms, apart


def _with(values: Tensor, bounds: Tensor) -> Exact:
    return Exact(values, torch.where(bounds.isfinite() & values.isfinite(), bounds, torch.inf))
