"""Rounding errors of a device's results against fp64: proven bounds, and an estimate for any other code.

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

Any other code runs once in fp64 (``estimate``), and then several times with random errors as large as those of the
device's type in what each operation of PyTorch's computes: Monte Carlo arithmetic. The root of the mean square of what
comes out is the estimate, with the cancellations of this very computation, forward and backward. It is no bound, so
that it is used with wide margins (``megasdc.sdc.referee.recompute.ESTIMATED``).

Source: Parker 1997, Monte Carlo Arithmetic (UCLA CSD-970002): random errors in results and, of sums, in the terms. A
sum of K terms has random roundings of the root of K times one, relative to the norm of its terms (Higham and Mary 2019,
A New Approach to Probabilistic Rounding Error Analysis).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megasdc.tensors.nested import map_in, tensors_in

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
        values: values of the elements, [n].
        bounds: largest differences that rounding explains, [n]; infinite where the type may overflow on the way.
    """

    values: Tensor
    bounds: Tensor


def product(
    left: Tensor, right: Tensor, kind: torch.dtype, bias: Tensor | None = None, working: torch.dtype = WORKING
) -> Exact:
    """Elements of a product of matrices, one from each pair of rows.

    Args:
        left: rows of the first factor, [n, K], as the device had them.
        right: rows of the second factor, [n, K].
        kind: type of the result.
        bias: bias, [n], added to the result in its own type; None: nothing is added.
        working: type in which products are added.
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
    """Statistics that a norm takes from each row, with the largest errors of the device's by rounding; all [..., 1].

    Args:
        mean: 0 for an RMSNorm.
        factor: one over the root of the variance, or of the mean square, and eps.
        steps: type of the result of each operation of the norm; sums are added up in ``WORKING``.
    """

    mean: Tensor
    mean_off: Tensor
    factor: Tensor
    factor_off: Tensor
    steps: torch.dtype = WORKING

    @classmethod
    def of(cls, rows: Tensor, eps: float, *, centred: bool, steps: torch.dtype = WORKING) -> NormMoments:
        """Moments of rows, [..., K]; ``centred``: of a LayerNorm.

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
        """The moments of a backward pass, which some devices keep in the type of the result."""
        mean_off = rounded(self.mean_off, self.mean, kind)
        return replace(self, mean_off=mean_off, factor_off=rounded(self.factor_off, self.factor, kind))


def normalized(
    own: Tensor, moments: NormMoments, weight: Tensor, bias: Tensor | None, kind: torch.dtype, count: int
) -> Exact:
    """Elements of a norm.

    Args:
        own: elements of the input, [n].
        moments: moments of their rows, [n, 1].
        weight: weight of their columns, [n]; bias likewise.
        count: number of elements of a row.
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
        gradient: each element's column of the output's gradient, [n, T].
        own: each element's column of the input, [n, T].
        moments: moments of the T rows, [T, 1].
        width: number of elements of a row.
        working: type in which tokens are summed.
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
        gradient: each element's row of the output's gradient, [n, K].
        rows: each element's row of the input, [n, K].
        columns: places of the elements in these rows, [n].
        moments: moments of the rows, [n, 1].
        weight: weight of the norm, [K].
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
        steps: whether the function is ReLU, whose derivative is a step.
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
    """Largest error of a number that is stored in a type."""
    return abs(torch.tensor(number, dtype=torch.float64).to(kind).item() - number)


def chosen(values: Tensor) -> Exact:
    """Elements that are copied: no rounding is allowed."""
    return Exact(values.double(), torch.zeros(len(values), dtype=torch.float64))


def rounded(bounds: Tensor, values: Tensor, kind: torch.dtype) -> Tensor:
    """The bound after one more rounding to a type, or one more operation in it."""
    info = torch.finfo(kind)
    return bounds + info.eps / 2 * (values.abs() + bounds) + info.tiny


def gamma(count: Tensor | int, kind: torch.dtype) -> Tensor:
    """Largest relative error of ``count`` roundings to a type; infinite where there is no bound."""
    product = torch.as_tensor(count, dtype=torch.float64) * torch.finfo(kind).eps / 2
    return torch.where(product < 0.5, product / (1 - product), torch.inf)


def _finite(values: Tensor, bounds: Tensor, sizes: Tensor, count: int, kind: torch.dtype) -> Exact:
    """With the rounding of fp64; without a bound where a type may overflow, or was not finite before."""
    bounds = bounds + gamma(4 * count + 4, torch.float64) * (sizes + values.abs())
    largest = min(torch.finfo(WORKING).max, torch.finfo(kind).max)
    return Exact(values, torch.where(sizes + values.abs() + bounds < largest, bounds, torch.inf))


def mean_of(parts: Sequence[Tensor], factor: float | Tensor, kind: torch.dtype, *, converted: bool = False) -> Exact:
    """The mean of the replicas' gradients, times a factor.

    A reduction adds N parts in any order, N - 1 roundings for each at most; it divides before or after, by a factor
    that is rounded itself unless N is a power of two; the factor, unless it is 1, costs a rounding of itself and one of
    the product. Each rounding is one of ``kind``; a quotient below its smallest normal number may be flushed to zero.

    Args:
        parts: gradient of each replica, [n].
        factor: of all elements, or of each, [n].
        kind: the coarsest type on the way.
        converted: whether parts are sent in another type than theirs: one more rounding of each.
    """
    count = len(parts)
    stacked = torch.stack([one.double() for one in parts])
    exact = count & (count - 1) == 0
    roundings = count - 1 + (0 if exact else 2) + (0 if not isinstance(factor, Tensor) and factor == 1.0 else 2)
    roundings += int(converted)
    values = stacked.sum(0) * (factor / count)
    sizes = stacked.abs().sum(0) * ((factor.abs() if isinstance(factor, Tensor) else abs(factor)) / count)
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
        logits: logits of m tokens, [m, V], without padding.
        labels: labels of these, [m].
        slopes: gradients of their losses, [m].
        rows: token of each element, from 0 to m - 1, [n].
        columns: logit of each element, [n]; from V on, padding, whose gradient is 0.
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


SAMPLES = 8
PAIRS, WILD = 3, 16.0
"""Number of pairs of runs with opposite errors, and their factor: so large that a near choice changes."""
MOST_OFF = 0.25
"""Largest share of a number that larger errors may have, beyond which little is as it was."""
SEED = 20_231
MOST = 2**26
"""Largest number of elements of an operation's result or input: several GiB with errors and gradients."""
MOST_PRODUCTS = 2**33
"""Largest number of products of two numbers that one operation may add up, in some seconds on a core."""
BUDGET_S = 60.0
"""Longest time that a rank computes for one dispute, since all others wait for it."""
_UNTIL: ContextVar[float] = ContextVar("until", default=math.inf)
"""Time, on the monotonic clock, at which the computation in this thread has taken too long."""
NARROW = (torch.float32, torch.bfloat16, torch.float16)
TALKS = ("c10d", "_c10d_functional")
CHOOSES = frozenset(
    (
        *("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "median", "nanmedian", "mode", "multinomial"),
        *("round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "frac", "heaviside", "searchsorted", "bucketize"),
        *("floor_divide", "remainder", "fmod", "histc", "unique_dim", "_unique", "_unique2", "unique_consecutive"),
        *("_local_scalar_dense", "poisson", "binomial", "_sample_dirichlet", "nextafter", "frexp"),
    )
)
"""Operations of which a rounding may change the result a lot; those with ``quant`` in their names are such, too."""
SELECTS = ("max", "min", "amax", "amin", "aminmax")
"""Operations that return one of their input's elements as it is; so do all of max pooling."""
PRODUCTS: Mapping[str, int] = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
"""Products, with the place of a factor whose last dimension is summed over."""
FUNCTIONS = ("gelu", "silu", "mish", "tanh", "erf", "sigmoid", "softplus", "elu", "hardswish")
"""Functions in which a device may have an absolute error of ``INACCURACY``, times the argument where it is a factor."""
COARSE = ("embedding_dense_backward", "embedding_backward", "index_add", "index_put", "scatter_add", "norm_backward")
"""Sums that may be added up in the type of the result."""


class Unfit(Exception):
    """A computation that is not made in fp64; the text says why."""


class NoiseBudget:
    """Time that is left to estimates, until as much as ``BUDGET_S`` is spent."""

    def __init__(self) -> None:
        self._left = BUDGET_S

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Context whose time is taken from the budget; estimates in it raise ``Unfit`` once none is left."""
        began = monotonic()
        token = _UNTIL.set(began + self._left)
        try:
            yield
        finally:
            _UNTIL.reset(token)
            self._left -= monotonic() - began


def estimate(compute: Callable[[], Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """A result in fp64, and an estimate of the rounding error of each of its elements in a type, of the same shape.

    Args:
        compute: computes the result, the same each time, from tensors in fp64.
        kind: coarsest type that a device uses on the way, unless the computation itself asks for a coarser one.

    Returns:
        The values, and the estimate, to which its mean over the last dimension is added; infinite where the type may
        have overflowed on the way. With errors ``WILD`` times as large a result that is off by more than twice as many
        times the estimate has a jump, which is allowed.

    Raises:
        Unfit: an operation is among those that are not estimated; or the result is not finite.
    """
    exact = _Noisy(kind, None)
    values = _run(compute, exact)
    if not values.isfinite().all():
        raise Unfit("its own code in fp64 gives NaN or Inf")
    kinds = {kind, *exact.asked}
    kind, lowest = max(kinds, key=lambda one: torch.finfo(one).eps), min(torch.finfo(one).max for one in kinds)
    if exact.largest > lowest / 4 or exact.sums > torch.finfo(WORKING).max / 4:
        return values, torch.full_like(values, torch.inf)
    squares = torch.zeros_like(values)
    for sample in range(SAMPLES):
        squares += (_run(compute, _Noisy(kind, SEED + sample, chosen=exact.chosen)) - values).square()
    spread = (squares / SAMPLES).sqrt()
    for sample in range(2 * PAIRS):
        times = WILD if sample % 2 else -WILD
        wild = _run(compute, _Noisy(kind, SEED + SAMPLES + sample // 2, times, exact.chosen))
        spread = spread.maximum((wild - values).abs() / (2 * WILD))
    around = spread.mean(-1, keepdim=True) if spread.dim() else spread
    return values, (spread + around + _floor(kind)).nan_to_num(nan=torch.inf)


def _run(compute: Callable[[], Tensor], mode: _Noisy) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH]), _Autocast(mode), mode:
        found = compute()
    mode.finish()
    if found.dtype != torch.float64:
        raise Unfit(f"its own code in fp64 gives {found.dtype}")
    return found.detach()


def _floor(kind: torch.dtype) -> float:
    """Largest error of a result too small for a type: denormal numbers of 32 bits may be flushed to zero."""
    info = torch.finfo(kind)
    return info.tiny * (info.eps if kind == torch.float16 else 1.0)


class _Autocast(TorchFunctionMode):
    """Context that tells a mode the types of automatic mixed precision that is on, which leaves fp64 as it is."""

    def __init__(self, mode: _Noisy) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._mode.record_type(torch.get_autocast_dtype(device))
        return func(*args, **(kwargs or {}))


class _Noisy(TorchDispatchMode):
    """Context in which nothing is made narrower than fp64, and results of operations have random errors.

    Args:
        seed: seed of the errors; None: there are no errors.
        times: factor of the errors; below 0: the opposite ones.
        chosen: ``chosen`` of a run without errors, which must be equal in this one; None: this is such a run.

    Attributes:
        largest: largest magnitude of inputs and results, without values that fill masks.
        sums: largest magnitude that a partial sum may have had, by its number of terms.
        asked: types below fp64 that were asked for.
        chosen: results of operations that are whole numbers or truth values, and were made of others.
    """

    def __init__(
        self, kind: torch.dtype, seed: int | None, times: float = 1.0, chosen: Sequence[Tensor] | None = None
    ) -> None:
        super().__init__()
        self._kind, self._times, self._expected, self._until = kind, times, chosen, _UNTIL.get()
        self.largest, self.sums = 0.0, 0.0
        self.asked, self.chosen = set[torch.dtype](), list[Tensor]()
        self._draw = None if seed is None else torch.Generator().manual_seed(seed)

    def record_type(self, kind: torch.dtype) -> None:
        """Note a type that is asked for."""
        if kind.is_floating_point and kind not in (*NARROW, torch.float64):
            raise Unfit(f"it computes in {kind}")
        if kind in NARROW:
            self.asked.add(kind)

    def finish(self) -> None:
        """End the run; ``Unfit`` if it has not made all choices of the run without errors."""
        if self._expected is not None and len(self._expected) != len(self.chosen):
            raise Unfit("it chooses by values that are near to a choice")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation."""
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        given = list(tensors_in((args, options)))
        wide = [one for one in given if one.dtype == torch.float64]
        if func.namespace in TALKS:
            raise Unfit("it communicates with other ranks")
        if monotonic() > self._until:
            raise Unfit(f"its own code in fp64, with that around it, takes more than {BUDGET_S:.0f} s")
        if any(one.numel() > MOST for one in wide) or _products(name, wide) > MOST_PRODUCTS:
            raise Unfit(f"an operation inside ({name}) has too many elements for fp64 on the host")
        _refuse(name, func, options, given, bool(wide))
        if isinstance(options.get("dtype"), torch.dtype):
            self.record_type(options["dtype"])
            options["dtype"] = torch.float64 if options["dtype"] in NARROW else options["dtype"]
        returned = [one.alias_info for one in func._schema.returns]
        if any(one is not None and not one.is_write for one in returned):  # a view
            return func(*args, **options)
        if name in ("empty_like", "empty", "new_empty", "empty_strided", "new_empty_strided"):  # nothing is in it yet
            return func(*args, **options)
        writes, sums = any(one is not None for one in returned), torch.Tag.pointwise not in func.tags
        fills = torch.Tag.nondeterministic_seeded in func.tags or name in ("zero_", "fill_", "copy_")  # even empty ones
        sums = sums and not fills and name not in SELECTS and "max_pool" not in name
        if sums and wide and self._draw is None:
            self.sums = max(self.sums, _partial(name, wide))
        if self._draw is not None and wide and not writes and sums:
            args = self._with_errors(name, func, args, options, wide)
        found = func(*args, **options)
        off = _of_function(name, wide) if any(one in name for one in FUNCTIONS) else None
        for one in tensors_in(found):
            if one.is_complex():
                raise Unfit("it computes with complex numbers")
            if one.dtype == torch.float64:
                self._after(one, wide, off)
            elif wide:
                self._choose(one)
        return found

    def _choose(self, found: Tensor) -> None:
        """Record whole numbers and truth values; ``Unfit`` if they are not those of the run without errors."""
        place = len(self.chosen)
        self.chosen.append(found.detach().clone())
        expected = self._expected
        if expected is not None and (place >= len(expected) or not torch.equal(expected[place], found)):
            raise Unfit("it chooses by values that are near to a choice")

    def _with_errors(self, name: str, func: Any, args: Any, options: Any, wide: list[Tensor]) -> Any:
        """Arguments of a sum, whose terms have errors for those of the partial sums."""
        share, count = torch.finfo(self._kind).eps, _terms(name, wide)
        if any(one in name for one in COARSE):
            share = share * max(one.numel() // max(one.shape[-1] if one.dim() else 1, 1) for one in wide)
        share = min(share + math.sqrt(count) * torch.finfo(WORKING).eps, 1.0)
        return map_in(Tensor, tuple(args), lambda one: self._moved(one, share) if one.dtype == torch.float64 else one)

    def _after(self, found: Tensor, made_of: list[Tensor], off: Tensor | None) -> None:
        if not made_of or not found.numel():
            return
        if self._draw is None:
            self.largest = max(self.largest, *(_largest(one) for one in (found, *made_of)))
        else:
            found.copy_(self._moved(found, torch.finfo(self._kind).eps, off))

    def _moved(self, values: Tensor, share: float, off: Tensor | None = None) -> Tensor:
        both = torch.rand((2, *values.shape), generator=self._draw, dtype=torch.float64) * 2 - 1
        share = max(share, min(share * abs(self._times), MOST_OFF))
        floor = (_floor(self._kind) + (0.0 if off is None else off)) * abs(self._times)
        errors = math.copysign(1.0, self._times) * (both[0] * values.abs() * share + both[1] * floor)
        return torch.where(values.isfinite(), values + torch.where(errors.isfinite(), errors, 0.0), values)


def _refuse(name: str, func: Any, options: Mapping[str, Any], given: Sequence[Tensor], wide: bool) -> None:
    """Raise ``Unfit`` for operations that are not estimated.

    Args:
        wide: whether an input is of fp64.
    """
    if any(one.is_complex() for one in given):
        raise Unfit("it computes with complex numbers")
    kind = options.get("dtype")
    whole = isinstance(kind, torch.dtype) and not kind.is_floating_point and not kind.is_complex
    drawn = name in ("bernoulli", "bernoulli_") and len(given) > (name == "bernoulli_")  # by given chances
    jumps = name.rstrip("_") in CHOOSES or "quant" in name or options.get("rounding_mode") is not None or drawn
    if wide and (jumps or whole):
        raise Unfit(f"it chooses by values ({name})")
    if any(one.is_quantized for one in given):
        raise Unfit("it computes with quantized numbers")
    if wide and func == torch.ops.aten.view.dtype:
        raise Unfit("it computes with bits of numbers")


def _largest(tensor: Tensor) -> float:
    """Largest magnitude in a tensor, without values that fill masks: infinities, and the largest numbers of types."""
    sizes = tensor.detach().abs()
    for fill in (torch.inf, *(torch.finfo(one).max for one in (torch.float64, *NARROW))):
        sizes = torch.where(sizes == fill, 0.0, sizes)
    return sizes.max().item() if sizes.numel() else 0.0


def _partial(name: str, factors: list[Tensor]) -> float:
    """Upper bound of the partial sums of an operation: of terms, or of products of two."""
    most = max(map(_largest, factors))
    linear = len(factors) == 1 and not any(one in name for one in ("norm", "var", "std"))
    return _terms(name, factors) * (most if linear else max(most, 1.0) ** 2)


def _of_function(name: str, given: list[Tensor]) -> Tensor | None:
    """Absolute errors of an activation, or of its derivative times what is given first (``bounds.activated_input``)."""
    sizes = [one.detach().abs() for one in given]
    if len({one.shape for one in sizes}) != 1:
        return None
    if "backward" not in name or len(sizes) == 1:
        return INACCURACY * sizes[0].clamp(min=1.0)
    return INACCURACY * sizes[0] * (4 + sizes[1] + sizes[1] ** 3)


def _products(name: str, factors: list[Tensor]) -> int:
    """Number of products of two numbers in a product of matrices."""
    place = PRODUCTS.get(name, len(factors))
    pair = factors[place : place + 2]
    return pair[0].numel() * pair[1].shape[-1] if len(pair) == 2 and pair[1].dim() > 1 else 0


def _terms(name: str, factors: list[Tensor]) -> int:
    """Approximate number of terms in each element of a result."""
    if name in PRODUCTS:
        return factors[min(PRODUCTS[name], len(factors) - 1)].shape[-1]
    return max(one.numel() for one in factors) // max(min(one.shape[-1] if one.dim() else 1 for one in factors), 1)
