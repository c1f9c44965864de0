"""What any code computes in fp64, and an estimate of what rounding makes of it on a device.

The code runs once in fp64, and then several times with random errors as large as those of the device's type in what
each operation of PyTorch's computes: Monte Carlo arithmetic. The root of the mean square of what comes out is the
estimate, with the cancellations of this very computation, forward and backward. It is no bound, so that it is used with
wide margins (``megasdc.sdc.referee.recompute.ESTIMATED``).

Source: Parker 1997, Monte Carlo Arithmetic (UCLA CSD-970002): random errors in results and, of sums, in the terms.
A sum of K terms has random roundings of the root of K times one, relative to the norm of its terms (Higham and Mary
2019, A New Approach to Probabilistic Rounding Error Analysis).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megasdc.sdc.referee.rounding_bounds import INACCURACY, WORKING
from megasdc.tensors.nested import map_in, tensors_in

SAMPLES = 8
PAIRS, WILD = 3, 16.0
"""Of runs with errors so many times as large, and with the opposite ones: what is near to a choice is then chosen."""
MOST_OFF = 0.25
"""Share of a number that larger errors are at most, beyond which little is as it was."""
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
        *("round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "frac", "heaviside", "searchsorted", "bucketize"),
        *("floor_divide", "remainder", "fmod", "histc", "unique_dim", "_unique", "_unique2", "unique_consecutive"),
        *("_local_scalar_dense", "poisson", "binomial", "_sample_dirichlet", "nextafter", "frexp"),
    )
)
"""Operations that a rounding may tip to quite another result; ``quant`` in the name of one says so, too."""
SELECTS = ("max", "min", "amax", "amin", "aminmax")
"""Operations, and all of pooling, that take one of what they are given, as it is."""
PRODUCTS: Mapping[str, int] = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
"""Products, by the place of a factor, whose last dimension is summed over."""
FUNCTIONS = ("gelu", "silu", "mish", "tanh", "erf", "sigmoid", "softplus", "elu", "hardswish")
"""Of which a device's have an absolute error of ``INACCURACY``, times the argument where that is a factor."""
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
        kind: the coarsest type that a device has on the way, unless the computation itself asks for a coarser one.

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
    """What is lost where a result is too small for a type: denormal numbers of 32 bits may be flushed to zero."""
    info = torch.finfo(kind)
    return info.tiny * (info.eps if kind == torch.float16 else 1.0)


class _Autocast(TorchFunctionMode):
    """Inside, types of automatic mixed precision that is on, which leaves fp64 as it is, are told to a mode."""

    def __init__(self, mode: _Noisy) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._mode.ask(torch.get_autocast_dtype(device))
        return func(*args, **(kwargs or {}))


class _Noisy(TorchDispatchMode):
    """Inside, nothing is made narrower than fp64, and results of operations have random errors.

    Args:
        seed: of the errors; None: there are none.
        times: the errors, as large; below 0: the opposite ones.
        chosen: of a run without errors, which is to be the same in this one; None: this is such a run.

    Attributes:
        largest: magnitude of what was given or computed, without what fills masks.
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

    def ask(self, kind: torch.dtype) -> None:
        """Note a type that is asked for."""
        if kind.is_floating_point and kind not in (*NARROW, torch.float64):
            raise Unfit(f"it computes in {kind}")
        if kind in NARROW:
            self.asked.add(kind)

    def finish(self) -> None:
        """The run has ended: it has made all choices of the other one."""
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
            self.ask(options["dtype"])
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
        """Whole numbers and truth values are those of the run without errors."""
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
    """Operations that are not estimated.

    Args:
        wide: whether it is given numbers of fp64.
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
    """The largest magnitude, without what fills masks: infinities, and the largest numbers of types."""
    sizes = tensor.detach().abs()
    for fill in (torch.inf, *(torch.finfo(one).max for one in (torch.float64, *NARROW))):
        sizes = torch.where(sizes == fill, 0.0, sizes)
    return sizes.max().item() if sizes.numel() else 0.0


def _partial(name: str, factors: list[Tensor]) -> float:
    """What no partial sum of an operation is larger than: of terms, or of products of two."""
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
    """How many products of two numbers a product of matrices is made of."""
    place = PRODUCTS.get(name, len(factors))
    pair = factors[place : place + 2]
    return pair[0].numel() * pair[1].shape[-1] if len(pair) == 2 and pair[1].dim() > 1 else 0


def _terms(name: str, factors: list[Tensor]) -> int:
    """About how many terms each element of a result is a sum of."""
    if name in PRODUCTS:
        return factors[min(PRODUCTS[name], len(factors) - 1)].shape[-1]
    return max(one.numel() for one in factors) // max(min(one.shape[-1] if one.dim() else 1 for one in factors), 1)
