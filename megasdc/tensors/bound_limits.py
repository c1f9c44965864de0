"""Limits of element-wise bounds on a gradient, and the fp32 numbers from which every implementation computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

NON_FINITE = ("keep", "zero", "bound")
"""Policies for NaN and Inf; see `Limits`."""
SUMS = ("squares", "mass", "removed", "by_absolute", "by_spike", "nan", "inf", "largest_ratio")
"""Sums of a pass, by index; see `megasdc.tensors.bound.bound_`."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ElementLimits:
    """Limits of the magnitude of an element.

    Args:
        absolute: theta_abs, above 0; inf: no such limit.
        spike: theta, above 0; g^2 / V' may not be above it; inf: no such limit.
        floor: lower limit of V', at least 0. An element with V' = 0 passes the spike rule, so that none is frozen at
            zero before it has a history.
        v_factor: V' = max(V * v_factor, floor); 1 / (1 - beta2^t) for Adam's bias correction, 1 for none.
        scale: loss scale, above 0: stored values are scale times the gradient.
        non_finite: ``keep``: NaN and Inf stay; ``zero``: both become 0; ``bound``: Inf becomes its limit with its sign,
            0 where it has none, and NaN becomes 0.

    Raises:
        ValueError: a value is outside its range.
    """

    absolute: float = math.inf
    spike: float = math.inf
    floor: float = 0.0
    v_factor: float = 1.0
    scale: float = 1.0
    non_finite: str = "keep"

    def __post_init__(self) -> None:
        for name in ("absolute", "spike"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, inf for no limit; got {getattr(self, name)}")
        for name in ("v_factor", "scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 0 <= self.floor < math.inf:
            raise ValueError(f"floor must be at least 0 and finite, got {self.floor}")
        if self.non_finite not in NON_FINITE:
            raise ValueError(f"non_finite must be one of {', '.join(NON_FINITE)}; got {self.non_finite!r}")


@dataclass(frozen=True)
class Factors:
    """The fp32 numbers from which every implementation computes limits.

    The limit of an element, in stored units, is min(absolute, spike * q), q = max(sqrt(V) * root_factor, root_floor),
    with spike = sqrt(theta) * scale, root_factor = sqrt(v_factor) and root_floor = sqrt(floor); inf: no limit.
    """

    absolute: float
    spike: float
    root_factor: float
    root_floor: float


@lru_cache(maxsize=64)
def limit_factors(limits: ElementLimits) -> Factors:
    """The fp32 numbers of limits."""
    return Factors(
        absolute=_fp32(limits.absolute * limits.scale),
        spike=_fp32(math.sqrt(limits.spike) * limits.scale),
        root_factor=_fp32(math.sqrt(limits.v_factor)),
        root_floor=_fp32(math.sqrt(limits.floor)),
    )


def _fp32(value: float) -> float:
    """The nearest fp32 number, inf if it is too large."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))
