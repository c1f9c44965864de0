"""How much slower each rank computes than its peers of the same stage, by the times of many steps: pure arithmetic.

A step's time on a rank is compared with the median of its peers in the same step, so that what all do alike (longer
sequences, a stage with more layers) cancels out. The mean of the logarithms over a window, the largest and smallest
tenth left out, is what lasts: it tells how many times slower the rank is. The spread of the same values is what is
random, and gives the error of that mean. Noise may be of a micro-batch or of a whole step: the spread is measured over
steps, and so holds either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
TRIM = 0.1
"""Share of a window's steps that are left out at either end: a single hiccup is no slowness."""


@dataclass(frozen=True)
class Slowness:
    """Ranks against their peers over some steps.

    Args:
        steps: that were compared.
        ratio: time over that of the peers, [replica, stage].
        sigmas: standard errors by which the logarithm of that is above 0, [replica, stage]; infinite without noise.
        noise: standard deviation of the logarithm from step to step, of the stage's median rank, [stage].
    """

    steps: int
    ratio: Values
    sigmas: Values
    noise: Values


def compare_with_peers(busy_s: Values) -> Slowness:
    """Compare the ranks of each stage.

    Args:
        busy_s: seconds a micro-batch, above 0, [step, replica, stage]; at least one step and two replicas.
    """
    logs = np.log(busy_s)
    ordered = np.sort(logs - _median_of_peers(logs), axis=0)
    steps = len(ordered)
    cut = int(TRIM * steps)
    kept = ordered[cut : steps - cut]
    mean = _mean(kept)
    # Winsorized, for the standard error of a trimmed mean: Tukey and McLaughlin 1963.
    winsorized = np.minimum(np.maximum(ordered, kept[0]), kept[-1])
    centred = winsorized - _mean(winsorized)
    spread = np.sqrt(np.add.reduce(centred * centred) / max(steps - 1, 1)) / (1 - 2 * cut / steps)
    noise = _middle(np.sort(spread, axis=0))
    error = np.maximum(spread, noise) / np.sqrt(steps)  # a short window may show less noise than there is
    if error.all():
        sigmas = mean / error
    else:
        sigmas = np.divide(mean, error, out=np.copysign(np.full_like(mean, np.inf), mean), where=error > 0)
    return Slowness(steps, np.exp(mean), sigmas, noise)


def _median_of_peers(values: Values) -> Values:
    """Median over the other replicas, [step, replica, stage]."""
    peers = values.shape[1] - 1
    if peers == 1:
        return values[:, ::-1]
    order = np.argsort(values, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)

    def without_own(index: int) -> Values:
        return np.where(place <= index, ordered[:, index + 1 : index + 2], ordered[:, index : index + 1])

    return (without_own((peers - 1) // 2) + without_own(peers // 2)) / 2


def _mean(values: Values) -> Values:
    """Along the first axis; methods of arrays take several times as long for the few values here."""
    found: Values = np.add.reduce(values) / len(values)
    return found


def _middle(ordered: Values) -> Values:
    """Median of what is ordered, along the first axis; likewise."""
    count = len(ordered)
    found: Values = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return found


def stage_times(busy_s: Values) -> Values:
    """Seconds a micro-batch of each stage, the median over steps and replicas, [stage].

    Args:
        busy_s: as of ``compare_with_peers``; one replica is enough.
    """
    return _middle(np.sort(busy_s.reshape(-1, busy_s.shape[-1]), axis=0))
