"""Do bounds, resets and warm-up together make the update that SPAM publishes? Against float64 over 2,000 steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasdc.optim.bounds import MomentumReset, RateWarmup
from megasdc.tensors.bound import bound_
from megasdc.tensors.bound_limits import SUMS, ElementLimits

STEPS, INTERVAL, GRACE, WARMUP, THETA = 2000, 500, 20, 150, 50.0
RATE, BETAS, EPS, DECAY = 5e-2, (0.9, 0.95), 1e-8, 0.1
SIZE = 64


def _gradient(step: int, weights: np.ndarray) -> np.ndarray:
    """Of a noisy quadratic, rarely multiplied by up to 1e6; the noise keeps Adam off the rounding of an optimum."""
    random = np.random.default_rng(5)
    curvature, optimum = random.uniform(0.5, 2, SIZE), random.normal(size=SIZE)
    random = np.random.default_rng((6, step))
    spikes = np.where(random.random(SIZE) < 2e-3, 10 ** random.uniform(1, 6, SIZE), 1.0)
    return (curvature * (weights - optimum) + random.normal(size=SIZE)) * spikes


def _reference(restart: bool, warmup: int) -> tuple[np.ndarray, int]:
    """SPAM as published; with ``restart`` the bias correction begins anew, as Stable-SPAM does.

    Source: Huang et al., SPAM, arXiv 2501.06842, algorithm 1; Huang et al., Stable-SPAM, arXiv 2502.17055.
    """
    w, m, v, count, bounded = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE), 0, 0
    for step in range(1, STEPS + 1):
        since = (step - 1) % INTERVAL
        if since == 0:
            m, v = np.zeros(SIZE), np.zeros(SIZE)
            count = 0 if restart else count
        count += 1
        gradient = _gradient(step, w)
        if since >= GRACE:
            mask = (gradient**2 > THETA * v) & (v > 0)
            bounded += int(mask.sum())
            gradient = np.where(mask, np.sign(gradient) * np.sqrt(THETA * v), gradient)
        m = BETAS[0] * m + (1 - BETAS[0]) * gradient
        v = BETAS[1] * v + (1 - BETAS[1]) * gradient**2
        factor = 1.0
        if step > INTERVAL and since < warmup:
            factor = 0.01 + 0.99 * (1 - np.cos(np.pi * since / warmup)) / 2
        corrected = (m / (1 - BETAS[0] ** count)) / (np.sqrt(v / (1 - BETAS[1] ** count)) + EPS)
        w = w * (1 - RATE * factor * DECAY) - RATE * factor * corrected
    return w, bounded


@pytest.mark.parametrize(("restart", "warmup"), [(False, WARMUP), (True, WARMUP), (False, 0)])
def test_two_thousand_steps(restart: bool, warmup: int) -> None:
    """Weights after 2,000 steps with three resets agree to 1e-6, and as many elements were bounded."""
    weights = torch.zeros(SIZE, requires_grad=True)
    inner = torch.optim.AdamW([weights], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    reset = MomentumReset(INTERVAL, warmup, 0.01, restart)
    rate = RateWarmup(inner)
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    for step in range(1, STEPS + 1):
        weights.grad = torch.from_numpy(_gradient(step, weights.detach().double().numpy())).float()
        if reset.is_due(step):
            reset.reset(inner)
        rate.factor = reset.rate_factor(step)
        if reset.steps_since(step) >= GRACE:
            bound_(weights.grad, inner.state[weights]["exp_avg_sq"], ElementLimits(spike=THETA), sums)
        inner.step()
        assert inner.param_groups[0]["lr"] == RATE
    expected, bounded = _reference(restart, warmup)
    error = np.linalg.norm(weights.detach().double().numpy() - expected) / np.linalg.norm(expected)
    assert error <= 1e-6
    assert sums[SUMS.index("by_spike")] == bounded > 100
