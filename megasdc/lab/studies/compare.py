"""Mismatches of a result with the trusted one: which elements differ, how far and in which bits. Pure.

Mismatch frequency and severity are those of Ma et al. 2025, Understanding Silent Data Corruption in LLM Training,
https://arxiv.org/abs/2502.12340: the share of elements that differ, and the mean of |u - h| / |h| over those where it
is not zero. Beyond the paper: elements differ if their bits do; the relative difference is computed in fp64, for
elements whose two values are finite and whose trusted value h is not zero; the others are counted separately.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasdc.tensors.bits import as_bits, count_flips


@dataclass(frozen=True)
class Mismatch:
    """How one result differs from the trusted one.

    Args:
        elements: of the result.
        mismatches: elements whose bits differ; at least 1.
        severity_count: mismatches that have a relative difference.
        severity_sum: sum of their relative differences.
        severity_max: the largest.
        from_zero: mismatches whose trusted value is zero and whose other value is finite and not zero.
        non_finite: mismatches in which one of the values is NaN or infinite.
        flips: number of mismatches by bit that differs, 0 is the lowest.
        decades: number of relative differences by the floor of their log10.
        samples: (row-major index, trusted value, other value) of some mismatches, evenly chosen.
    """

    elements: int
    mismatches: int
    severity_count: int
    severity_sum: float
    severity_max: float
    from_zero: int
    non_finite: int
    flips: dict[int, int]
    decades: dict[int, int]
    samples: tuple[tuple[int, float, float], ...]

    def fields(self) -> dict[str, Any]:
        """As plain values for a line of JSON; sampled values as text, because JSON has no NaN."""
        return {
            **vars(self),
            "flips": {str(bit): count for bit, count in self.flips.items()},
            "decades": {str(decade): count for decade, count in self.decades.items()},
            "samples": [[place, f"{healthy:.9g}", f"{other:.9g}"] for place, healthy, other in self.samples],
        }


def compare_results(healthy: Tensor, other: Tensor, num_samples: int) -> Mismatch | None:
    """Compares a result with the trusted one; None if all bits are equal.

    Any shape and floating-point dtype, equal for both, on one device. ``num_samples``: maximum of mismatches listed one
    by one.

    Sync: waits for the device.
    """
    places = (as_bits(healthy) != as_bits(other)).flatten().nonzero().flatten()
    if not places.numel():
        return None
    before, after = (tensor.detach().flatten()[places].cpu() for tensor in (healthy, other))
    places = places.cpu()
    reference, value = before.double(), after.double()
    finite = reference.isfinite() & value.isfinite()
    relative = ((value - reference).abs() / reference.abs())[finite & (reference != 0)]
    relative = relative[relative > 0]
    chosen = torch.arange(min(num_samples, places.numel())) * places.numel() // max(1, min(num_samples, places.numel()))
    flips = {bit: count for bit, count in enumerate(count_flips(before, after)) if count}
    return Mismatch(
        elements=healthy.numel(),
        mismatches=places.numel(),
        severity_count=relative.numel(),
        severity_sum=float(relative.sum()),
        severity_max=float(relative.max()) if relative.numel() else 0.0,
        from_zero=int((finite & (reference == 0) & (value != 0)).sum()),
        non_finite=int((~finite).sum()),
        flips=flips,
        decades=dict(sorted(Counter(relative.log10().floor().int().tolist()).items())),
        samples=tuple(zip(places[chosen].tolist(), reference[chosen].tolist(), value[chosen].tolist(), strict=True)),
    )
