"""Does eq. 1 mean the same while the norm is clipped? Against a float64 average of gradients that nothing clipped."""

from __future__ import annotations

import math

import pytest
import torch

from megasdc.optim.bounds import ClipFactors
from megasdc.optim.zero1 import clip_factor
from megasdc.tensors.bound import bound_
from megasdc.tensors.bound_limits import SUMS, ElementLimits

BETA, THETA, STEPS, OUTLIER = 0.95, 100.0, 40, 5


def _gradients(norms: list[float]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    plain = [torch.randn(1000, generator=generator, dtype=torch.float64) for _ in norms]
    return [norm * one / one.norm() for norm, one in zip(norms, plain, strict=True)]


def _bound_after(gradients: list[torch.Tensor], largest: float, outlier: float) -> float:
    """Value that an outlier is cut to after Adam's second moment has seen the gradients, clipped to a norm."""
    moment, clips = torch.zeros(1000), ClipFactors(BETA)
    for gradient in gradients:
        factor = clip_factor(float(gradient.norm()), largest)
        moment = BETA * moment + (1 - BETA) * (factor * gradient).float() ** 2
        clips.add(factor)
    spike = gradients[-1].float()
    spike[OUTLIER] = outlier
    limits = ElementLimits(spike=THETA, floor=1e-16 * clips.unclipping, v_factor=clips.unclipping)
    bound_(spike, moment, limits, torch.zeros(len(SUMS), dtype=torch.float64))
    return float(spike[OUTLIER])


@pytest.mark.parametrize("factor", [1.0, 0.1, 0.01])
def test_an_outlier_is_bounded_alike_at_every_clip(factor: float) -> None:
    """Gradients of norm 8 clipped by the factor: the limit is sqrt(theta V) of the unclipped ones, in float64."""
    gradients = _gradients([8.0] * STEPS)
    expected = sum((1 - BETA) * BETA ** (STEPS - 1 - step) * one[OUTLIER] ** 2 for step, one in enumerate(gradients))
    found = _bound_after(gradients, 8.0 * factor if factor < 1 else 0.0, 1e6)
    assert found == pytest.approx(math.sqrt(THETA * float(expected)), rel=1e-5)


def test_a_clip_that_changes_weighs_steps_by_its_square() -> None:
    """Norms of 1 to 100 clipped to 2: the limit is that of the mean of g^2 with V's weights times c^2."""
    norms = torch.logspace(0, 2, STEPS).tolist()
    gradients = _gradients(norms)
    weights = [(1 - BETA) * BETA ** (STEPS - 1 - step) for step in range(STEPS)]
    squares = [min(1.0, 2 / norm) ** 2 for norm in norms]
    mean = sum(w * c * float(g[OUTLIER]) ** 2 for w, c, g in zip(weights, squares, gradients, strict=True))
    mean *= sum(weights) / sum(w * c for w, c in zip(weights, squares, strict=True))
    assert _bound_after(gradients, 2.0, -1e9) == pytest.approx(-math.sqrt(THETA * mean), rel=1e-5)


def test_nothing_changes_without_a_clip() -> None:
    """No bit: the factor is 1 before the first step, without a clip, below the clip, and after a reset."""
    clips = ClipFactors(0.999)
    assert clips.unclipping == 1.0
    for norm in (0.1, 0.5, 0.9):
        clips.add(clip_factor(norm, 1.0))
        assert clips.unclipping == 1.0
    clips.add(clip_factor(50.0, 1.0))
    assert clips.unclipping > 1.0
    clips.clear()
    assert clips.unclipping == 1.0 == clip_factor(1e9, 0.0)
