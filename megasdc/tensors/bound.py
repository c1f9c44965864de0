"""Element-wise bounds on a gradient, in one pass that also counts and sums squares.

Two rules (Pei, Lausen, Karypis 2025): absolute, |g| <= theta_abs; spike-aware, |g| <= sqrt(theta V) wherever g^2 / V is
above theta, V being the second moment of the optimizer. Both are decided in fp32 against limits that never overflow or
underflow on the way: sqrt(V) is taken first, so that a gradient of 1e38 or a subnormal V is decided correctly. An
element within a few fp32 ULP of its limit may be decided otherwise than in exact arithmetic.

Gradients are stored times a loss scale; limits apply to unscaled values. An element within its limit keeps its bits. A
bounded one becomes the limit with its own sign; in 16 bits the limit is rounded towards zero, so it is never exceeded.

This file has the choice of an implementation, the formula in torch operations that every implementation follows, and
the one for the host; `megasdc.tensors.bound_kernel` is that of a GPU. Settings and sums are in
`megasdc.tensors.bound_limits`.

On the host it is one fused pass in C. The machine's own C compiler builds the library at first use, since the fastest
code depends on the processor. It is kept in the user's cache folder under a hash of source, compiler options and
processor, so that a new version or another kind of node builds its own. Ranks that start at once may each compile; each
writes to a temporary folder and renames, so that none loads an incomplete library.

Source: Pei, Lausen, Karypis 2025, IEEE Micro, https://doi.org/10.1109/MM.2025.3642709, eq. 1; Huang et al. 2025, SPAM,
ICLR, https://arxiv.org/abs/2501.06842, for V from before the step. Ours: the floor of V, the policies for non-finite
elements, and that elements without a V pass.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megasdc.common.errors import LaunchError
from megasdc.tensors.bound_limits import DTYPES, NON_FINITE, SUMS, ElementLimits, Factors, limit_factors

logger = logging.getLogger(__name__)

COMPILED, TRITON, FORMULA = "fused C pass", "fused Triton kernel", "formula in torch's operations"
"""Implementations; see `implementation`."""
CHUNK = 1 << 16
"""Elements processed at once, to save memory and stay in a CPU's cache."""


def bound_(gradient: Tensor, second_moment: Tensor | None, limits: ElementLimits, sums: Tensor) -> None:
    """Bound a gradient in place, by the fastest implementation for its device, and add to the sums.

    Args:
        gradient: [n] contiguous; fp32, bf16 or fp16; on any device.
        second_moment: [n] contiguous fp32 on the same device, V from before this step; None: there is none yet.
        sums: [8] fp64 on the same device, by `SUMS`. All but the last are added to: ``squares`` of finite stored values
            after bounding; ``mass``, the sum of |g| of finite elements before, and ``removed``, the decrease of that
            sum, both unscaled; counts of finite elements bounded ``by_absolute`` and ``by_spike``: by the smaller
            limit, the absolute one on a tie; counts of ``nan`` and ``inf`` before. The last, ``largest_ratio``, becomes
            the maximum of itself and g^2 / V' of finite unscaled elements before, over those with V' above 0. Where V'
            is not finite the spike rule bounds nothing and there is no ratio.

    Raises:
        ValueError: a wrong type, shape or device, or a finite spike limit without a second moment.

    Sync: none.
    """
    _check_arguments(gradient, second_moment, limits, sums)
    _function(implementation(gradient.device))(gradient, second_moment, limits, sums)


def _function(name: str) -> Callable[[Tensor, Tensor | None, ElementLimits, Tensor], None]:
    if name == COMPILED:
        return bound_on_host_
    if name == TRITON:
        from megasdc.tensors.bound_kernel import bound_on_gpu_

        return bound_on_gpu_
    return bound_formula_


@cache
def implementation(device: torch.device) -> str:
    """The implementation that `bound_` uses on a device; the first call may compile for some seconds.

    Returns:
        `COMPILED`, `TRITON` or `FORMULA`. The last is several times slower, and used only where the device's own is
        unavailable, which the first call logs.
    """
    try:
        if device.type == "cpu":
            fused_library()
            return COMPILED
        if device.type == "cuda":
            import megasdc.tensors.bound_kernel  # noqa: F401

            return TRITON
    except LaunchError as error:
        logger.warning("gradient bounds on %s run by torch's operations, several times slower: %s", device, error)
    return FORMULA


def _check_arguments(gradient: Tensor, second_moment: Tensor | None, limits: ElementLimits, sums: Tensor) -> None:
    """Raise ValueError for what no implementation supports."""
    if gradient.dtype not in DTYPES or gradient.dim() != 1 or not gradient.is_contiguous():
        raise ValueError(f"gradient must be [n] contiguous in fp32, bf16 or fp16; got {_describe(gradient)}")
    if second_moment is None:
        if limits.spike < math.inf:
            raise ValueError(f"the spike limit {limits.spike} needs a second moment, got None")
    elif (
        second_moment.dtype != torch.float32
        or second_moment.shape != gradient.shape
        or second_moment.device != gradient.device
        or not second_moment.is_contiguous()
    ):
        raise ValueError(
            f"second_moment must be contiguous fp32 of the shape and device of the gradient {_describe(gradient)}; "
            f"got {_describe(second_moment)}"
        )
    if sums.dtype != torch.float64 or sums.shape != (len(SUMS),) or sums.device != gradient.device:
        raise ValueError(f"sums must be [{len(SUMS)}] in fp64 on {gradient.device}; got {_describe(sums)}")


def bound_formula_(gradient: Tensor, second_moment: Tensor | None, limits: ElementLimits, sums: Tensor) -> None:
    """`bound_` in torch operations; the reference for every implementation.

    Args:
        gradient: see `bound_`.
        second_moment: see `bound_`.
        limits: see `bound_`.
        sums: see `bound_`; terms are added in fp64.

    Sync: none.
    """
    for begin in range(0, gradient.numel(), CHUNK):
        part = slice(begin, begin + CHUNK)
        _bound_chunk(gradient[part], None if second_moment is None else second_moment[part], limits, sums)


def _bound_chunk(gradient: Tensor, second_moment: Tensor | None, limits: ElementLimits, sums: Tensor) -> None:
    magnitude = gradient.to(torch.float32).abs()
    finite, infinite = magnitude < math.inf, magnitude == math.inf
    limit, of_spike, known = _limits_of(magnitude, second_moment, limit_factors(limits))
    over = finite & (magnitude > limit)
    bounded = torch.copysign(_towards_zero(limit, gradient.dtype), gradient)
    after = torch.where(over, bounded, gradient)
    if limits.non_finite != "keep":
        after = torch.where(finite, after, 0)
    if limits.non_finite == "bound":
        after = torch.where(infinite & (limit < math.inf), bounded, after)

    exact, rest = magnitude.to(torch.float64), after.to(torch.float64).abs()
    mass = torch.where(finite, exact, 0)
    sums[:7] += torch.stack(
        [
            torch.where(rest < math.inf, rest, 0).square().sum(),
            mass.sum() / limits.scale,
            torch.where(finite, mass - rest, 0).sum() / limits.scale,
            (over & ~of_spike).sum(),
            (over & of_spike).sum(),
            gradient.isnan().sum(),
            infinite.sum(),
        ]
    )
    if second_moment is not None:
        smoothed = (second_moment.to(torch.float64) * limits.v_factor).clamp(min=limits.floor)
        ratio = torch.where(finite & known, (exact / limits.scale).square() / smoothed, 0)
        torch.maximum(sums[7], ratio.max(), out=sums[7])
    gradient.copy_(after)


def _limits_of(magnitude: Tensor, second_moment: Tensor | None, numbers: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """For each element: limit in stored units, fp32; whether it is the spike rule's; whether 0 < V' < inf."""
    absolute = torch.full_like(magnitude, numbers.absolute)
    if second_moment is None:
        none = torch.zeros_like(magnitude, dtype=torch.bool)
        return absolute, none, none
    exact = second_moment.clamp(min=0).to(torch.float64).sqrt()  # torch 2.13 rounds fp32 roots incorrectly on the host
    root = exact.to(torch.float32).mul(numbers.root_factor).clamp(min=numbers.root_floor)  # NaN propagates
    known = (root > 0) & (root < math.inf)
    spike = torch.where(known, root * numbers.spike, math.inf)
    return torch.minimum(absolute, spike), spike < absolute, known


def _towards_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Non-negative numbers in a narrower type, rounded down."""
    narrow = values.to(dtype)
    if dtype == torch.float32:
        return narrow
    return (narrow.view(torch.int16) - (narrow.to(torch.float32) > values).to(torch.int16)).view(dtype)


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


SOURCE = Path(__file__).with_name("bound_host.c")
OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
"""Not -ffast-math, which ignores NaN and makes the whole process flush subnormal numbers; without contraction, so that
limits are rounded as the formula's are."""
COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 120


class _Limits(ctypes.Structure):
    """`struct limits` of the source."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("absolute", "spike", "root_factor", "root_floor")),
        *((name, ctypes.c_double) for name in ("theta", "floor", "v_factor", "scale")),
        ("non_finite", ctypes.c_int32),
    ]


def bound_on_host_(gradient: Tensor, second_moment: Tensor | None, limits: ElementLimits, sums: Tensor) -> None:
    """`megasdc.tensors.bound.bound_` on the host, in one thread; raises as `fused_library`.

    ``squares`` and ``mass`` are summed in fp32 within blocks of 1024, and over blocks in fp64.
    """
    fused_library().megasdc_bound(
        gradient.data_ptr(),
        None if second_moment is None else second_moment.data_ptr(),
        gradient.numel(),
        DTYPES.index(gradient.dtype),
        _c_limits(limits),
        sums.data_ptr(),
    )


@lru_cache(maxsize=64)
def _c_limits(limits: ElementLimits) -> _Limits:
    numbers = limit_factors(limits)
    return _Limits(
        numbers.absolute,
        numbers.spike,
        numbers.root_factor,
        numbers.root_floor,
        limits.spike,
        limits.floor,
        limits.v_factor,
        limits.scale,
        NON_FINITE.index(limits.non_finite),
    )


@cache
def fused_library() -> ctypes.CDLL:
    """The compiled pass; LaunchError as `load_library`."""
    library, pointer = load_library(SOURCE), ctypes.c_void_p
    library.megasdc_bound.argtypes = (
        pointer,
        pointer,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.POINTER(_Limits),
        pointer,
    )
    library.megasdc_bound.restype = None
    return library


def load_library(source: Path) -> ctypes.CDLL:
    """Compile a C file for this processor, unless the cache holds it, and load it.

    Args:
        source: needs nothing but the C library.

    Raises:
        LaunchError: there is no compiler, it fails, or the cache folder cannot be used.
    """
    text = source.read_bytes()
    key = hashlib.sha256(b"\0".join([text, " ".join(OPTIONS).encode(), _processor().encode()])).hexdigest()[:24]
    folder = _cache_folder() / "megasdc" / "compiled"
    library = folder / f"{source.stem}-{key}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise LaunchError(f"{library} cannot be built or loaded: {error}; XDG_CACHE_HOME chooses its folder") from error


def _cache_folder() -> Path:
    """Folder of what can be made again: of the user, or of this Python for one without a home folder."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    home = os.path.expanduser("~")  # unchanged without HOME and without an entry in passwd
    return Path(sys.prefix) if home == "~" else Path(home) / ".cache"


def _compile(source: Path, library: Path) -> None:
    names = [os.environ["CC"]] if os.environ.get("CC") else COMPILERS
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise LaunchError(f"no C compiler {', '.join(names)} is on PATH; install gcc, or name one in CC")
    with tempfile.TemporaryDirectory(dir=library.parent) as own:
        made = Path(own) / library.name
        command = [compiler, *OPTIONS, "-o", str(made), str(source), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, errors="replace", timeout=_COMPILE_S)
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip()[-1000:]
            raise LaunchError(f"{' '.join(command)} ended with {error.returncode}; install gcc: {said}") from error
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"{' '.join(command)} did not finish within {_COMPILE_S} s") from error
        made.replace(library)


def _processor() -> str:
    """Name and instruction sets of this processor, as far as Linux reports them."""
    wanted, found = ("vendor_id", "model name", "flags", "Features", "CPU part"), {platform.machine()}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.add(value.strip())
    return "\n".join(sorted(found))
