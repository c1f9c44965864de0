"""What any code computes in fp64, and an estimate of what rounding makes of it on a device.

The code runs once in fp64, and then several times with random errors as large as those of the device's type in what
each operation of PyTorch's computes: Monte Carlo arithmetic. The root of the mean square of what comes out is the
estimate, with the cancellations of this very computation, forward and backward. It is no bound, so that it is used with
wide margins (``megasdc.sdc.exhibits.calls.ESTIMATED``).

Source: Parker 1997, Monte Carlo Arithmetic (UCLA CSD-970002): random errors in results and, of sums, in the terms.
A sum of K terms has random roundings of the root of K times one, relative to the norm of its terms (Higham and Mary
2019, A New Approach to Probabilistic Rounding Error Analysis).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from megasdc.sdc.fp64.bounds import INACCURACY, WORKING
from megasdc.tensors.nested import map_in, tensors_in

SAMPLES = 8
SEED = 20_231
MOST = 2**26
"""Elements that an operation may have as a result, or is given: with errors and gradients there are several GiB."""
MOST_PRODUCTS = 2**33
"""Of two numbers that one operation may add up: a core takes seconds for as many."""
BUDGET_S = 60.0
"""Longest time that a rank computes for one dispute, since all others wait for it."""
_UNTIL: ContextVar[float] = ContextVar("until", default=math.inf)
"""When what is computed in this thread has taken too long."""
NARROW = (torch.float32, torch.bfloat16, torch.float16)
TALKS = ("c10d", "_c10d_functional")
CHOOSES = frozenset(
    (
        *("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "median", "nanmedian", "mode", "multinomial"),
        *("round", "floor", "ceil", "trunc", "sign", "sgn", "frac", "searchsorted", "bucketize"),
    )
)
"""Operations that a rounding may tip to quite another result."""
PRODUCTS: Mapping[str, int] = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
"""Products, by the place of a factor, whose last dimension is summed over."""
FUNCTIONS = ("gelu", "silu", "mish", "tanh", "erf", "sigmoid", "softplus", "elu", "hardswish")
"""Of which a device's have an absolute error of ``INACCURACY``, times the argument where that is a factor."""
COARSE = ("embedding_dense_backward", "embedding_backward", "index_add", "index_put", "scatter_add", "norm_backward")
"""Sums that may be added up in the type of the result."""


class Unfit(Exception):
    """A computation that is not made in fp64; the text says why."""


class Budget:
    """Time that is left to estimates, until as much as ``BUDGET_S`` is spent."""

    def __init__(self) -> None:
        self._left = BUDGET_S

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Inside, time is spent; estimates raise ``Unfit`` once none is left."""
        began = monotonic()
        token = _UNTIL.set(began + self._left)
        try:
            yield
        finally:
            _UNTIL.reset(token)
            self._left -= monotonic() - began


def estimate(compute: Callable[[], Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """A result in fp64, and what rounding to a type makes of each of its elements, of the same shape.

    Args:
        compute: the result, the same each time, from tensors in fp64.
        kind: the coarsest type that a device has on the way.

    Returns:
        The values, and the estimate, to which its mean over the last dimension is added; infinite where the type may
        have overflowed on the way.

    Raises:
        Unfit: an operation is among those that are not estimated; or the result is not finite.
    """
    exact = _Noisy(kind, None)
    values = _run(compute, exact)
    if not values.isfinite().all():
        raise Unfit("its own code in fp64 gives NaN or Inf")
    if exact.largest > torch.finfo(kind).max / 4:
        return values, torch.full_like(values, torch.inf)
    squares = torch.zeros_like(values)
    for sample in range(SAMPLES):
        squares += (_run(compute, _Noisy(kind, SEED + sample)) - values).square()
    spread = (squares / SAMPLES).sqrt()
    around = spread.mean(-1, keepdim=True) if spread.dim() else spread
    return values, (spread + around + _floor(kind)).nan_to_num(nan=torch.inf)


def _run(compute: Callable[[], Tensor], mode: _Noisy) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH]), mode:
        found = compute()
    if found.dtype != torch.float64:
        raise Unfit(f"its own code in fp64 gives {found.dtype}")
    return found.detach()


def _floor(kind: torch.dtype) -> float:
    """What is lost where a result is too small for a type: denormal numbers of 32 bits may be flushed to zero."""
    info = torch.finfo(kind)
    return info.tiny * (info.eps if kind == torch.float16 else 1.0)


class _Noisy(TorchDispatchMode):
    """Inside, nothing is made narrower than fp64, and results of operations have random errors.

    Args:
        seed: of the errors; None: there are none.

    Attributes:
        largest: finite magnitude of what was computed.
    """

    def __init__(self, kind: torch.dtype, seed: int | None) -> None:
        super().__init__()
        self._kind, self.largest, self._until = kind, 0.0, _UNTIL.get()
        self._draw = None if seed is None else torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation."""
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        wide = [one for one in tensors_in((args, options)) if one.dtype == torch.float64]
        if func.namespace in TALKS:
            raise Unfit("it communicates with other ranks")
        if monotonic() > self._until:
            raise Unfit(f"its own code in fp64, with that around it, takes more than {BUDGET_S:.0f} s")
        if any(one.numel() > MOST for one in wide) or _products(name, wide) > MOST_PRODUCTS:
            raise Unfit(f"an operation inside ({name}) has too many elements for fp64 on the host")
        if name in CHOOSES and wide:
            raise Unfit(f"it chooses by values ({name})")
        if options.get("dtype") in NARROW and (wide or not list(tensors_in((args, options)))):
            options["dtype"] = torch.float64
        returned = [one.alias_info for one in func._schema.returns]
        if any(one is not None and not one.is_write for one in returned):  # a view
            return func(*args, **options)
        if name in ("empty_like", "empty", "new_empty", "empty_strided", "new_empty_strided"):  # nothing is in it yet
            return func(*args, **options)
        writes = any(one is not None for one in returned)
        if self._draw is not None and wide and not writes and torch.Tag.pointwise not in func.tags:
            args = self._with_errors(name, func, args, options, wide)
        found = func(*args, **options)
        off = _of_function(name, wide) if any(one in name for one in FUNCTIONS) else None
        for one in tensors_in(found):
            if one.dtype == torch.float64:
                self._after(one, wide, off)
        return found

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
        sizes = found.detach().abs()
        limit = torch.finfo(torch.float64).max / 4  # a mask is as large as can be
        finite = torch.where(sizes < min(limit, 1e30), sizes, 0.0)
        self.largest = max(self.largest, finite.max().item())
        if self._draw is not None:
            found.copy_(self._moved(found, torch.finfo(self._kind).eps, off))

    def _moved(self, values: Tensor, share: float, off: Tensor | None = None) -> Tensor:
        both = torch.rand((2, *values.shape), generator=self._draw, dtype=torch.float64) * 2 - 1
        errors = both[0] * values.abs() * share + both[1] * (_floor(self._kind) + (0.0 if off is None else off))
        return torch.where(values.isfinite(), values + torch.where(errors.isfinite(), errors, 0.0), values)


def _of_function(name: str, given: list[Tensor]) -> Tensor | None:
    """Absolute errors of an activation, or of its derivative times what is given first (``bounds.activated_input``)."""
    sizes = [one.detach().abs() for one in given]
    if len({one.shape for one in sizes}) != 1:
        return None
    if "backward" not in name or len(sizes) == 1:
        return INACCURACY * sizes[0].clamp(min=1.0)
    return INACCURACY * sizes[0] * (4 + sizes[1] + sizes[1] ** 3)


def _products(name: str, factors: list[Tensor]) -> int:
    """How many products of two numbers a product of matrices is made of."""
    place = PRODUCTS.get(name, len(factors))
    pair = factors[place : place + 2]
    return pair[0].numel() * pair[1].shape[-1] if len(pair) == 2 and pair[1].dim() > 1 else 0


def _terms(name: str, factors: list[Tensor]) -> int:
    """About how many terms each element of a result is a sum of."""
    if name in PRODUCTS:
        return factors[min(PRODUCTS[name], len(factors) - 1)].shape[-1]
    return max(one.numel() for one in factors) // max(min(one.shape[-1] if one.dim() else 1 for one in factors), 1)
