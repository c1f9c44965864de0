"""Are planted frequencies and severities recovered from two tensors alone?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from megasdc.common.addresses import Address
from megasdc.config.faults import FaultSpec
from megasdc.faults.injector import Injector
from megasdc.lab.studies.hook import Mismatch, compare_results
from megasdc.parallel.dims import ParallelDims

ADDRESS = Address(1, 0, "forward", "2.layer.mlp.linear_fc2", "output")


def _planted(numel: int, dtype: torch.dtype = torch.float32, **fault: Any) -> Mismatch:
    """What is measured of a tensor that one fault has harmed; what was changed is counted by the injector."""
    healthy = torch.randn(numel, generator=torch.Generator().manual_seed(7)).to(dtype)
    healthy[healthy == 0] = 1.0
    injector = Injector([FaultSpec.model_validate(fault)], ParallelDims(1, 1, 1), 64)
    other = injector(ADDRESS, healthy)
    assert other is not None
    found = compare_results(healthy, other, 4)
    assert found is not None
    assert found.mismatches == injector.firings[0].changed
    return found


@pytest.mark.parametrize("share", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_planted_frequencies(share: float) -> None:
    """From 1e-2 to 1e-6 the share that differs is the planted one within five standard errors."""
    numel = min(16_000_000, round(2000 / share))
    found = _planted(numel, kind="scale", factor=2.0, element_probability=share)
    assert abs(found.mismatches - share * numel) < 5 * math.sqrt(share * numel)
    assert found.severity_count == found.mismatches
    assert found.severity_sum == found.mismatches and found.severity_max == 1.0


@pytest.mark.parametrize("exponent", range(-6, 13))
def test_planted_severities(exponent: int) -> None:
    """A factor 1 + s gives severity s from 1e-6 to 1e12, as exactly as fp32 holds the product."""
    severity = 10.0**exponent
    found = _planted(100_000, kind="scale", factor=1.0 + severity, element_probability=0.05)
    mean = found.severity_sum / found.severity_count
    assert mean == pytest.approx(severity, rel=6e-8 / min(severity, 1.0) + 1e-7)
    assert found.severity_max == pytest.approx(severity, rel=1.2e-7 / min(severity, 1.0) + 1e-7)
    assert sum(found.decades.values()) == found.severity_count
    assert set(found.decades) <= {exponent - 1, exponent}


def test_noise_has_its_deviation() -> None:
    """Noise of deviation d has mean severity d sqrt(2 / pi)."""
    found = _planted(400_000, kind="noise", deviation=0.1, element_probability=0.5)
    mean = found.severity_sum / found.severity_count
    assert mean == pytest.approx(0.1 * math.sqrt(2 / math.pi), rel=5 * 0.76 / math.sqrt(found.severity_count))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.bfloat16, 16), (torch.float16, 16)])
def test_flipped_bits_are_counted(dtype: torch.dtype, bits: int) -> None:
    """Flips of two given bits are found in those bits, in every element once."""
    found = _planted(1000, dtype, bits=[3, bits - 1], elements=17)
    assert found.mismatches == 17 and found.flips == {3: 17, bits - 1: 17}


def test_against_numpy() -> None:
    """Counts, severities, elements from zero and without a finite value are those of NumPy's arithmetic in fp64."""
    healthy = torch.tensor([1.0, 2.0, 0.0, 0.0, -4.0, math.nan, 3.0, 5.0, math.inf, 8.0])
    other = torch.tensor([1.0, 2.5, 1e-3, -0.0, 4.0, math.nan, math.nan, math.inf, 1.0, 8.0])
    found = compare_results(healthy, other, 100)
    assert found is not None
    h, u = healthy.numpy().astype(np.float64), other.numpy().astype(np.float64)
    with np.errstate(all="ignore"):
        relative = np.abs(u - h) / np.abs(h)
    relative = relative[np.isfinite(relative) & np.isfinite(u) & (relative > 0)]
    assert (found.elements, found.mismatches) == (10, 7)
    assert (found.severity_count, found.severity_sum) == (len(relative), relative.sum())
    assert found.severity_max == relative.max() == 2.0
    assert (found.from_zero, found.non_finite) == (1, 3)
    assert [place for place, _, _ in found.samples] == [1, 2, 3, 4, 6, 7, 8]
    assert found.decades == {-1: 1, 0: 1}


def test_equal_bits_are_no_mismatch() -> None:
    """NaN with the same bits agrees, whatever the strides; samples are spread over all places and bounded."""
    healthy = torch.full((4, 6), math.nan).t()
    assert compare_results(healthy, healthy.contiguous(), 3) is None
    found = compare_results(torch.ones(1000), torch.arange(1000.0) + 5, 4)
    assert found is not None and [place for place, _, _ in found.samples] == [0, 250, 500, 750]
    none = compare_results(torch.ones(3), torch.zeros(3), 0)
    assert none is not None and none.samples == ()
