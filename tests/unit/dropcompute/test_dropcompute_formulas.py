"""Do the closed forms hold against other ways to compute them: known values, quadrature, drawn samples?"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from megasdc.dropcompute.threshold import (
    EULER_GAMMA,
    exact_cut,
    exact_longest,
    expected_completed,
    expected_longest,
    expected_speedup,
    extra_steps_share,
    gradient_norm_bound,
    longest_density,
    normal_cdf,
    published_norm_bound,
    published_speedup,
)

X = np.arange(-12, 14, 1e-3)
DENSITY = np.exp(-(X**2) / 2) / math.sqrt(2 * math.pi)


def density_of_largest(replicas: int) -> np.ndarray:
    """Of N standard normal values, on X, from the density alone: N phi Phi^(N-1)."""
    below = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in X])
    return replicas * DENSITY * below ** (replicas - 1)


def test_known_values() -> None:
    """The largest of 1, 2 and 3 normal values is 0, 1 / sqrt(pi) and 1.5 / sqrt(pi) on average."""
    for replicas, value in ((1, 0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi))):
        assert exact_longest(replicas, 0, 1) == pytest.approx(value, abs=1e-9)
    assert exact_longest(2, 7, 3) == pytest.approx(7 + 3 / math.sqrt(math.pi), abs=1e-9)
    assert normal_cdf(0.0) == 0.5 and normal_cdf(-10.0) == pytest.approx(7.619853e-24, rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 5, 64, 2048, 1_000_000])
def test_exact_expectations_by_another_quadrature(replicas: int) -> None:
    """E[X] and E[min(c, X)] agree with sums over the density of the largest value."""
    density = density_of_largest(replicas)
    assert exact_longest(replicas, 0, 1) == pytest.approx((X * density).sum() * 1e-3, abs=1e-8)
    for cut in (-3.0, 0.0, 1.7, 4.0, 6.0):
        assert exact_cut(replicas, cut) == pytest.approx((np.minimum(cut, X) * density).sum() * 1e-3, abs=2e-7)


@pytest.mark.parametrize("noise", [0.0, 0.3, 20.0])
def test_convergence_bound_is_the_least_over_learning_rates(noise: float) -> None:
    """Over all rates up to 1 / (L b_max) none gives less than the bound says, and the rate that it names gives it."""
    samples, largest, smoothness, gap = 6400.0, 32.0, 3.0, 5.0
    value, rate = gradient_norm_bound(samples, largest, smoothness, noise, gap)
    rates = np.linspace(1e-6, 1 / (smoothness * largest), 200_001)
    tried = (gap / (rates * samples) + smoothness * rates * noise**2 / 2) / (1 - smoothness * rates * largest / 2)
    assert value == pytest.approx(tried.min(), rel=1e-6)
    assert rate == pytest.approx(rates[tried.argmin()], rel=1e-3)


def test_the_published_bound_is_the_larger() -> None:
    """The paper's formula, term by term; ours is below it for any problem, and the same where gradients have no
    noise.
    """
    assert published_norm_bound(2_560_000, 512, 1, 1, 1) == pytest.approx(2 * 512 / 2.56e6 + 2 / 1600)
    problems = 10 ** np.random.default_rng(3).uniform(-4, 4, (2000, 5))
    for samples, largest, smoothness, noise, gap in problems.tolist():
        published = published_norm_bound(samples, largest, smoothness, noise, gap)
        assert published == pytest.approx(
            2 * smoothness * largest * gap / samples + 2 * noise * (smoothness * gap) ** 0.5 / samples**0.5
        )
        assert gradient_norm_bound(samples, largest, smoothness, noise, gap)[0] < published
        quiet = gradient_norm_bound(samples, largest, smoothness, 0.0, gap)[0]
        assert quiet == pytest.approx(published_norm_bound(samples, largest, smoothness, 0.0, gap))


def test_sgd_with_random_batches_stays_below_the_convergence_bound() -> None:
    """On a quadratic with noisy gradients and random batches: below the bound, and not by orders of magnitude."""
    draws = np.random.default_rng(5)
    curvature, noise, largest, steps = np.array([2.0, 1.0, 0.1]), 1.5, 16, 400
    start = np.array([1.0, -2.0, 3.0])
    means = []
    for _ in range(200):
        batches = draws.integers(1, largest + 1, steps)
        gap = 0.5 * (curvature * start**2).sum()
        bound, rate = gradient_norm_bound(batches.sum(), largest, curvature.max(), noise, gap)
        place, total = start.copy(), 0.0
        for size in batches:
            gradient = curvature * place
            total += size * (gradient**2).sum()
            place -= rate * (size * gradient + draws.normal(0, noise / math.sqrt(3) * math.sqrt(size), 3))
        means.append(total / batches.sum() / bound)
    assert 0.01 < np.mean(means) < 1


@pytest.mark.parametrize("replicas", [1, 4, 64])
def test_eq_3_is_the_density_of_the_slowest(replicas: int) -> None:
    """It is that of the largest standard value, moved and stretched; drawn times fall into bins as it says."""
    mean, std = 5.4, 0.3
    found = longest_density(mean + std * X, replicas, mean, std)
    assert found == pytest.approx(density_of_largest(replicas) / std, rel=1e-9, abs=1e-12)
    assert (found * std * 1e-3).sum() == pytest.approx(1, abs=1e-9)
    drawn = np.random.default_rng(4).normal(mean, std, (50_000, replicas)).max(axis=1)
    measured, edges = np.histogram(drawn, 30, density=True)
    middles, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    assert np.abs(measured - longest_density(middles, replicas, mean, std)).sum() * width < 0.04


def test_eq_4_approaches_the_exact_value() -> None:
    """The error of eq. 4, in standard deviations, is below .05 from 8 replicas on and shrinks up to a million."""
    errors = [abs(expected_longest(n, 0, 1) - exact_longest(n, 0, 1)) for n in (8, 64, 512, 4096, 1_000_000)]
    assert errors[0] < 0.05 and errors == sorted(errors, reverse=True)
    assert expected_longest(100, 5, 2) == pytest.approx(5 + 2 * expected_longest(100, 0, 1))
    # by hand: Phi^-1(.99) = 2.3263479, Phi^-1(1 - 1 / 100 e) = 2.6800 (tables)
    assert expected_longest(100, 0, 1) == pytest.approx(0.4227843 * 2.3263479 + 0.5772157 * 2.6800, abs=1e-3)
    with pytest.raises(ValueError, match="at least 2"):
        expected_longest(1, 0, 1)


def test_eq_5_and_6_against_samples() -> None:
    """Completed micro-batches and effective speed-up of a million normal latencies are what the formulas say."""
    replicas, micro_batches, mean, std, communication = 16, 12, 0.45, 0.09, 0.5
    draws = np.random.default_rng(2).normal(mean, std, (6000, replicas, micro_batches))
    ends = draws.cumsum(axis=2)
    longest = ends[..., -1].max(axis=1)
    thresholds = np.array([1.0, 3.2, 4.5, 5.2, 5.6, 7.0, math.inf])
    completed = expected_completed(thresholds, micro_batches, mean, std)
    speedup = expected_speedup(thresholds, replicas, micro_batches, mean, std, communication)
    for place, tau in enumerate(thresholds):
        done = (ends <= tau).sum(axis=2)
        assert done.mean() == pytest.approx(completed[place], abs=4.5 * done.std() / math.sqrt(done.size) + 1e-6)
        step = np.minimum(tau, longest) + communication
        measured = done.mean() * (longest.mean() + communication) / (micro_batches * step.mean())
        assert measured == pytest.approx(speedup[place], rel=3e-3)
    assert speedup[-1] == pytest.approx(1, abs=1e-9) and completed[-1] == micro_batches
    assert speedup.max() > 1.02


def test_extra_steps() -> None:
    """A tenth dropped is a ninth more steps, as in the paper's Table 1; all dropped never ends."""
    assert extra_steps_share(0.1) == pytest.approx(1 / 9)
    assert extra_steps_share(0) == 0 and extra_steps_share(1) == math.inf


def test_the_published_curve_is_eqs_4_to_6() -> None:
    """With the standard library's normal distribution, one threshold at a time; 1 where nothing is dropped."""
    replicas, micro_batches, mean, std, communication = 64, 12, 0.45, 0.09, 0.5
    normal, spread, planned = NormalDist(), math.sqrt(12) * std, 12 * mean
    far = (1 - EULER_GAMMA) * normal.inv_cdf(1 - 1 / replicas)
    far += EULER_GAMMA * normal.inv_cdf(1 - 1 / (math.e * replicas))
    longest = planned + spread * far
    thresholds = np.array([4.5, 5.4, 6.0, math.inf])
    found = published_speedup(thresholds, replicas, micro_batches, mean, std, communication)
    for tau, value in zip(thresholds.tolist(), found.tolist(), strict=True):
        done = sum(normal.cdf((tau - m * mean) / (math.sqrt(m) * std)) for m in range(1, micro_batches + 1))
        wanted = done * (longest + communication) / (micro_batches * (min(tau, longest) + communication))
        assert value == pytest.approx(wanted, rel=1e-9)
    assert found[-1] == 1.0 and found.max() > 1.05
    with pytest.raises(ValueError, match="at least 2"):
        published_speedup(thresholds, 1, micro_batches, mean, std, communication)
