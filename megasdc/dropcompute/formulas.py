"""Closed forms of DropCompute: convergence, step time, completed micro-batches and effective speed-up.

Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute variance reduction",
NeurIPS 2023, arXiv 2306.10598, section 4. N replicas compute M micro-batches a step, whose latencies are independent
with mean mu and standard deviation s. The time of a replica is taken as normal with mean M mu and variance M s^2, and
the time T of a step, without communication, is that of the slowest replica. All times are in seconds.

Differences from the paper: the expectation of the largest of N normal values is also computed by quadrature, to show
the error of eq. 4; so is that of min(tau, T), which eq. 6 states for one step.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

EULER_GAMMA = float(np.euler_gamma)
_ERFC = np.frompyfunc(math.erfc, 1, 1)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)
_FAR = 40.0
"""Standard deviations beyond which the tail of a normal distribution is negligible in float64."""


def normal_cdf(x: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Phi, the standard normal distribution function, element by element."""
    return np.asarray(_ERFC(-np.asarray(x, dtype=np.float64) / math.sqrt(2)), dtype=np.float64) / 2


def gradient_norm_bound(
    samples: float, largest_batch: float, smoothness: float, noise: float, start_gap: float
) -> tuple[float, float]:
    """Bound on E[||grad L||^2] of SGD whose batch differs from step to step, and the learning rate that gives it.

    Theorem 4.1 (eq. 2) in kind, derived here: of K ``samples`` in steps of b_i <= ``largest_batch``, a step being eta
    times the sum of b_i gradients. A loss with ``smoothness`` (Lipschitz constant) L and gradients with variance
    ``noise``^2 falls by at least eta b_i ||grad||^2 (1 - L eta b_i / 2) - L eta^2 b_i sigma^2 / 2 in expectation. With
    eta <= 1 / (L b_max), summed over steps, and with D = ``start_gap``, the first loss over the least one:
    E[||grad||^2] <= 2 D / (eta K) + L eta sigma^2, the mean over samples, so that steps weigh as their batches do.
    What is dropped costs convergence only by the samples that it lacks: b_max is the planned batch with and without.
    The paper's own constants are another choice of eta; both fall as 1 / sqrt(K) once K is large.
    """
    largest_rate = 1 / (smoothness * largest_batch)
    free = math.sqrt(2 * start_gap / (smoothness * samples)) / noise if noise > 0 else math.inf
    rate = min(free, largest_rate)
    return 2 * start_gap / (rate * samples) + smoothness * rate * noise**2, rate


def expected_longest(num_replicas: int, mean_s: float, std_s: float) -> float:
    """E[T] by eq. 4: the largest of N >= 2 normal values, by the limit of extreme values.

    std_s ((1 - g) Phi^-1(1 - 1/N) + g Phi^-1(1 - 1/(e N))) + mean_s, g being Euler's constant; a replica's time has the
    mean M mu and the deviation sqrt(M) s. ValueError for one replica, for which eq. 4 is undefined.
    """
    if num_replicas < 2:
        raise ValueError(f"num_replicas is {num_replicas}, needed at least 2")
    inverse = NormalDist().inv_cdf
    # Phi^-1(1 - p) is -Phi^-1(p), which loses no precision for small p
    far = (1 - EULER_GAMMA) * inverse(1 / num_replicas) + EULER_GAMMA * inverse(1 / (math.e * num_replicas))
    return mean_s - std_s * far


def exact_longest(num_replicas: int, mean_s: float, std_s: float) -> float:
    """E[T] of N >= 1 normal values by quadrature of eq. 3's distribution of the largest, Phi^N, without eq. 4's limit.

    ``mean_s`` and ``std_s`` are of a replica's time.
    """
    return mean_s + std_s * exact_cut(num_replicas, _FAR)


def exact_cut(num_replicas: int, cut: float) -> float:
    """E[min(c, X)], X being the largest of N >= 1 standard normal values: c - the integral of Phi(x)^N up to c.

    In standard deviations from the mean, as c; for a large c the expected largest value. Relative error below 1e-9.
    """
    cut = min(cut, _FAR)
    edges = np.linspace(-_FAR, cut, 17)  # pieces, because Phi^N rises within a fraction of a standard deviation
    half = np.diff(edges)[:, None] / 2
    x = edges[:-1, None] + half * (1 + _NODES)
    below, above = normal_cdf(x), normal_cdf(-x)  # the smaller of the two is precise
    log = np.where(x < 0, np.log(np.maximum(below, 1e-300)), np.log1p(-np.minimum(above, 0.5)))
    power = np.exp(num_replicas * log)
    return float(cut - (half * _WEIGHTS * power).sum())


def expected_completed(
    thresholds_s: NDArray[np.float64], micro_batches: int, mean_s: float, std_s: float
) -> NDArray[np.float64]:
    """E[M~] by eq. 5, [threshold]: micro-batches that a replica completes before tau; an infinite tau: all.

    The sum over m = 1..M of Phi((tau - m mu) / sqrt(m s^2)), with mu and s > 0 of one micro-batch.
    """
    number = np.arange(1, micro_batches + 1)
    return normal_cdf((np.asarray(thresholds_s)[:, None] - number * mean_s) / (np.sqrt(number) * std_s)).sum(axis=1)


def expected_speedup(
    thresholds_s: NDArray[np.float64],
    num_replicas: int,
    micro_batches: int,
    mean_s: float,
    std_s: float,
    communication_s: float,
) -> NDArray[np.float64]:
    """S_eff by eq. 6, [threshold], with E[M~] of eq. 5 and the exact expectations of T and min(tau, T).

    E[M~] (E[T] + Tc) / (M (E[min(tau, T)] + Tc)), 1 without drops; mu and s > 0 are of one micro-batch, Tc >= 0 of a
    step.
    """
    mean, std = micro_batches * mean_s, math.sqrt(micro_batches) * std_s
    cut = np.array([mean + std * exact_cut(num_replicas, (tau - mean) / std) for tau in thresholds_s])
    completed = expected_completed(thresholds_s, micro_batches, mean_s, std_s)
    longest = exact_longest(num_replicas, mean, std)
    return completed * (longest + communication_s) / (micro_batches * (cut + communication_s))


def published_speedup(
    thresholds_s: NDArray[np.float64],
    num_replicas: int,
    micro_batches: int,
    mean_s: float,
    std_s: float,
    communication_s: float,
) -> NDArray[np.float64]:
    """S_eff, [threshold], as the paper plots it: eq. 6 with E[M~] of eq. 5, and E[T] of eq. 4 in place of every T.

    E[M~] (E[T] + Tc) / (M (min(tau, E[T]) + Tc)). ValueError for one replica, for which eq. 4 is undefined; other
    arguments as of ``expected_speedup``.
    """
    longest = expected_longest(num_replicas, micro_batches * mean_s, math.sqrt(micro_batches) * std_s)
    completed = expected_completed(thresholds_s, micro_batches, mean_s, std_s)
    cut = np.minimum(thresholds_s, longest)
    return completed * (longest + communication_s) / (micro_batches * (cut + communication_s))


def extra_steps_share(drop_rate: float) -> float:
    """Additional steps, as a share of the planned ones, that make up for the dropped micro-batches: R / (1 - R).

    0.11 for a drop rate R of 0.1, as in the paper's Table 1; infinite for 1.
    """
    return drop_rate / (1 - drop_rate) if drop_rate < 1 else math.inf
