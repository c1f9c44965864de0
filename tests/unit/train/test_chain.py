"""What does the chain from the gradient to the parameters take for right, and what for wrong?"""

from __future__ import annotations

import math

import pytest
import torch

from megasdc.train.detection.chain import LARGEST_NORM, is_norm_of

ROUNDING = 20 * 2.0**-24


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e17, 1e18, 1e19, 1e20, 1e37])
def test_what_fp32_makes_of_squares_is_right_however_large_they_are(scale: float) -> None:
    """A finite gradient whose squares exceed fp32: parts of ranks, groups and the whole are infinite in turn."""
    gradient = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)).double() * scale
    gradient[0] /= 100  # one rank's part stays finite longest
    parts = torch.linalg.vector_norm(gradient, dim=1).square().float()
    for part, squares in zip(parts.tolist(), gradient.square().sum(1).tolist(), strict=True):
        assert is_norm_of(math.sqrt(part), squares, ROUNDING)
    exact = float(gradient.square().sum())
    for norm in (float(parts.sum().sqrt()), float(torch.linalg.vector_norm(parts.sqrt()))):
        assert is_norm_of(norm, exact, ROUNDING)
        assert is_norm_of(norm if math.isfinite(norm) else -1.0, exact, ROUNDING)
        assert not is_norm_of(1.02 * math.sqrt(exact), exact, ROUNDING), "another finite norm is wrong at any size"
    if exact < LARGEST_NORM**2:
        assert not any(is_norm_of(norm, exact, ROUNDING) for norm in (math.inf, math.nan, -1.0))


@pytest.mark.parametrize("squares", [math.inf, math.nan, -1.0])
def test_no_finite_norm_is_one_of_what_is_no_sum_of_squares(squares: float) -> None:
    """An element that is not finite, or a sum that cannot be one: only a norm that is not finite is right."""
    assert is_norm_of(math.inf, squares, ROUNDING) and is_norm_of(-1.0, squares, ROUNDING)
    assert not any(is_norm_of(norm, squares, ROUNDING) for norm in (0.0, 1.0, LARGEST_NORM, 3e38))


def test_both_are_right_only_where_rounding_decides() -> None:
    """Closer to the limit than rounding; below no infinite norm is right, not even of no gradient at all."""
    for near in (1 - ROUNDING / 2, 1 + ROUNDING / 2):
        squares = (near * LARGEST_NORM) ** 2
        assert is_norm_of(near * LARGEST_NORM, squares, ROUNDING) and is_norm_of(math.inf, squares, ROUNDING)
    assert not is_norm_of(math.inf, ((1 - 2 * ROUNDING) * LARGEST_NORM) ** 2, ROUNDING)
    assert not is_norm_of(math.inf, 0.0, ROUNDING)
