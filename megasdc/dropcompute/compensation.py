"""Compensation for dropped micro-batches (Giladi et al., arXiv 2306.10598, section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasdc.config.sections.drop_compute import largest_batch
from megasdc.dropcompute.formulas import extra_steps_share

Seconds = NDArray[np.float64]
TOLERANCE = 0.01
"""A larger batch completes what was planned, but for this share."""
AIM_RANGE = 0.1
"""Share of the planned micro-batches by which a step may aim at more or fewer of them."""
REPAID_IN_STEPS = 10
"""Steps in which a larger batch makes up for what steps before completed too little or too much."""


def extra_steps(dropped: int, per_step: int) -> int:
    """Additional steps after which as many micro-batches are completed as were planned, rounded up.

    Args:
        dropped: micro-batches dropped so far, over all replicas.
        per_step: planned in one step, over all replicas.
    """
    return -(-dropped // per_step)


def expected_steps(steps: int, drop_rate: float) -> int:
    """Length of a run with this constant drop rate: I_base (1 + R), R = rate / (1 - rate), rounded up.

    Args:
        drop_rate: share of micro-batches dropped, below 1.
    """
    return -(-round(steps * (1 + extra_steps_share(drop_rate)) * 1_000_000) // 1_000_000)


@dataclass(frozen=True)
class LargerBatch:
    """Planned micro-batches of a replica's step, and the threshold with which as many as before are completed.

    Args:
        micro_batches: M', planned.
        tau_s: infinite if nothing is to be gained: M' is then M.
        completed: by a replica in a step, mean over the recorded ones.
        compute_s: compute time of a step, of its slowest replica, mean over the recorded ones.
        aims: (completed micro-batches, threshold that completes them), rising, around what is planned; empty if
            nothing is dropped.
    """

    micro_batches: int
    tau_s: float
    completed: float
    compute_s: float
    aims: tuple[tuple[float, float], ...] = ()


def choose_larger_batch(
    start_s: Seconds,
    end_s: Seconds,
    stages: int,
    max_drop_rate: float,
    min_micro_batches: int,
    expected_s: Seconds,
    tau_s: float = math.inf,
) -> LargerBatch:
    """Choose M' and tau together, so that replicas complete the M planned micro-batches on average.

    For each M' that may be planned there is one such tau: a larger M' has an earlier one, and steps whose lengths
    differ less. The pair with the shortest step is taken. Giladi et al. (section 4) raise M by R = r / (1 - r) for the
    drop rate r of the smaller batch; with the same tau, replicas that were late before stay so and complete nothing of
    what was added, so that less than M is completed.

    Args:
        start_s: when the first stage started each micro-batch in steps in which nothing was dropped, [replica, step,
            micro-batch], seconds since the step began.
        end_s: when the first stage ended the backward pass of each, same shape and origin.
        stages: of the pipeline.
        max_drop_rate: largest share (M' - M) / M' of the planned micro-batches.
        min_micro_batches: that every replica starts in every step.
        expected_s: how long before the threshold a micro-batch must be started, [replica].
        tau_s: the latest threshold. If it is finite, M' is the smallest number that completes M; M where none does.

    Returns:
        The same on every rank that gives the same arguments.

    Collective: none.
    """
    planned = start_s.shape[2]
    largest = largest_batch(planned, max_drop_rate)
    starts, ends = prolong_steps(start_s, end_s, largest, stages)
    starts = starts + expected_s[:, None, None]
    found = [LargerBatch(planned, math.inf, float(planned), mean_longest(end_s[:, :, -1]))]
    for number in range(planned + 1, largest + 1):
        one = _with_as_many(starts[:, :, :number], ends[:, :, :number], planned, min_micro_batches)
        if one is not None and one.tau_s <= tau_s:
            found.append(one)
            if math.isfinite(tau_s):
                return one
    return min(found, key=lambda one: one.compute_s)


def prolong_steps(start_s: Seconds, end_s: Seconds, micro_batches: int, stages: int) -> tuple[Seconds, Seconds]:
    """Times of steps as if they had more micro-batches.

    What was not recorded is taken from the same replica's next steps: the times between the starts of micro-batches
    while the pipeline is full. So a replica that is slow stays slow.

    Args:
        start_s: [replica, step, micro-batch], seconds since the step began.
        end_s: likewise.
        micro_batches: of a step of the result, at least as many as recorded.
    """
    recorded = start_s.shape[2]
    more = micro_batches - recorded
    if not more:
        return start_s, end_s
    gaps = np.diff(start_s, axis=2)[:, :, min(stages - 1, max(recorded - 2, 0)) :] if recorded > 1 else end_s - start_s
    repeats = -(-(more + 1) // gaps.shape[2])
    following = np.concatenate([np.roll(gaps, -1 - ahead, axis=1) for ahead in range(repeats)], axis=2)
    before = end_s[:, :, -1:] - start_s[:, :, -1:] if stages == 1 else following[:, :, more : more + 1]
    first = np.concatenate([before, following[:, :, : more - 1]], axis=2).cumsum(axis=2)
    later = following[:, :, :more].cumsum(axis=2)
    return (
        np.concatenate([start_s, start_s[:, :, -1:] + first], axis=2),
        np.concatenate([end_s, end_s[:, :, -1:] + later], axis=2),
    )


def _with_as_many(start_s: Seconds, end_s: Seconds, wanted: int, min_micro_batches: int) -> LargerBatch | None:
    """The threshold with which replicas complete ``wanted`` on average; None if none does, within ``TOLERANCE``."""
    replicas, steps, planned = start_s.shape
    optional = np.sort(start_s[:, :, min_micro_batches:].ravel())

    def threshold(completed: float) -> float | None:
        number = round(replicas * steps * (completed - min_micro_batches))
        return float(optional[number - 1] + optional[number]) / 2 if 0 < number < optional.size else None

    tau_s = threshold(wanted)
    if tau_s is None:
        return None
    counts = min_micro_batches + (start_s[:, :, min_micro_batches:] < tau_s).sum(axis=2)
    completed = float(counts.sum() / counts.size)
    if abs(completed / wanted - 1) > TOLERANCE:
        return None
    last_s = np.take_along_axis(end_s, counts[:, :, None] - 1, axis=2)[:, :, 0]
    aims = [(aim, threshold(aim)) for aim in wanted * np.linspace(1 - AIM_RANGE, 1 + AIM_RANGE, 41)]
    known = tuple((float(aim), tau) for aim, tau in aims if tau is not None)
    return LargerBatch(planned, tau_s, completed, mean_longest(last_s), known)


@dataclass
class WorkBalance:
    """Keeps the completed work at the planned one: what steps completed too little or too much, later steps repay.

    Args:
        wanted: micro-batches that a replica is to complete in a step, on average.
        replicas: of the run.
        aims: of the chosen ``LargerBatch``; empty: it is not chosen yet, or drops nothing.
        owed: micro-batches that all replicas together have completed too few, negative: too many.
    """

    wanted: int
    replicas: int
    aims: Sequence[Sequence[float]] = ()
    owed: int = 0

    @property
    def tau_s(self) -> float:
        """Threshold of the next step, from which on ``REPAID_IN_STEPS`` steps would repay all; needs ``aims``."""
        aim = self.wanted + self.owed / (self.replicas * REPAID_IN_STEPS)
        completed, tau_s = zip(*self.aims, strict=True)
        return float(np.interp(aim, completed, tau_s))

    def count(self, completed: Sequence[int]) -> None:
        """Count a step, [replica]; only once there are ``aims``."""
        if self.aims:
            self.owed += self.wanted * self.replicas - sum(completed)


def mean_longest(compute_s: Seconds) -> float:
    """Mean over steps of the slowest replica's time, [replica, step]; exactly rounded."""
    return math.fsum(compute_s.max(axis=0)) / compute_s.shape[1]
