"""Predicted and measured speed-up, from the step times of runs without a threshold and with one.

A speed-up is micro-batches completed per second over those without a threshold, whole steps, whatever is done between
them included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.config.faults import DelaySpec
from megasdc.dropcompute.gate import DECISIONS_FILE, read_decisions
from megasdc.dropcompute.threshold import Curve, DropRule, search_recorded, search_threshold
from megasdc.dropcompute.tuning import TOLERANCE, RecordedSteps
from megasdc.events import read_events
from megasdc.faults.delay import draw_delays
from megasdc.lab.report.step_times import load_step_times
from tools.bench.drops.options import Segment

RESAMPLED = 20
"""Number of times that each recorded micro-batch is dealt out anew, so that the slowest replica is not one of few."""
TimedRun = tuple[Path, Sequence[float]]
"""Run folder, and seconds of each step."""


@dataclass(frozen=True)
class Comparison:
    """One threshold; its ``tau_s`` is None where none was better than any.

    ``own``: the run chose it. ``predicted_rate`` and ``predicted`` (the speed-up) come from the steps that predict,
    with their micro-batches dealt out anew; ``predicted_same`` from the measured steps' own recording without a
    threshold, so that an error of it is not chance.
    """

    also = ("difference",)

    tau_s: float | None
    own: bool
    predicted_rate: float
    rate: float
    predicted: float
    predicted_same: float
    speedup: float

    @property
    def difference(self) -> float:
        """Of the measured speed-up from the predicted one, over the latter."""
        return self.speedup / self.predicted - 1


@dataclass(frozen=True)
class LargerBatchRun:
    """A run with a larger batch of ``micro_batches``; ``predicted``: the speed-up that it expected when it chose.

    ``completed`` are micro-batches over those planned without drops; ``speedup`` is of micro-batches per second.
    """

    also = ("passed",)

    tau_s: float | None
    micro_batches: int
    completed: float
    predicted: float
    speedup: float

    @property
    def passed(self) -> bool:
        """Whether as much was completed as was planned, within ``TOLERANCE``."""
        return abs(self.completed - 1) <= TOLERANCE


def score_larger_batch(plain: TimedRun, larger: TimedRun, measured: Segment) -> LargerBatchRun:
    """The steps ``measured`` of a run with a larger batch, beside a run without a threshold."""
    (chosen,) = read_events(larger[0], kind="drop", name="threshold", rank=0)
    replicas, _, micro_batches = recorded_steps(plain[0], measured).start_s.shape
    share, speedup = _progress(plain, larger, measured, replicas, micro_batches)
    return LargerBatchRun(
        tau_s=chosen.fields["tau_s"],
        micro_batches=chosen.fields["micro_batches"],
        completed=share,
        predicted=chosen.fields["speedup"],
        speedup=speedup,
    )


def _progress(
    plain: TimedRun, dropping: TimedRun, measured: Segment, replicas: int, micro_batches: int
) -> tuple[float, float]:
    """Completed micro-batches over planned ones, and per second over those without a threshold."""
    counts = read_decisions(dropping[0] / DECISIONS_FILE, replicas, micro_batches)
    share = sum(sum(counts[step].completed) for step in measured.steps) / (
        replicas * micro_batches * len(measured.steps)
    )
    seconds, plain_s = (math.fsum(run[1][measured.start : measured.stop]) for run in (dropping, plain))
    return share, share * plain_s / seconds


def recorded_steps(run_dir: Path, segment: Segment) -> RecordedSteps:
    """Times of the first stage of each replica, in steps of a run in which nothing was dropped."""
    found = load_step_times(run_dir, segment.start + 1, segment.stop)
    return RecordedSteps(found.start_s[:, 0], found.end_s[:, 0], found.compute_s[:, 0], found.step_s[:, 0])


def resampled_curve(steps: RecordedSteps) -> Curve:
    """The effect of each threshold where micro-batches last as long as recorded ones, in any order on any replica.

    The recorded steps are of one stage, with micro-batches that depend on neither replica nor step.
    """
    latencies = np.diff(steps.end_s, axis=-1, prepend=0.0)
    replicas, _, micro_batches = latencies.shape
    dealt = np.random.default_rng(0).permutation(np.tile(latencies.ravel(), RESAMPLED))
    return search_threshold(
        dealt.reshape(replicas, -1, micro_batches), steps.communication_s, rule=DropRule(finish=True)
    ).curve


def choose_thresholds(steps: RecordedSteps, rates: Sequence[float], sigmas: float | None) -> list[float]:
    """Thresholds that drop about these shares of micro-batches, as the steps predict."""
    curve = resampled_curve(steps)
    dropped = 1 - curve.completed_share[:-1]
    starts = [float(curve.thresholds_s[int(np.abs(dropped - rate).argmin())]) for rate in rates]
    return [start + expected_s(steps, sigmas) for start in starts]


def expected_s(steps: RecordedSteps, sigmas: float | None) -> float:
    """Seconds before the threshold until which a micro-batch is started: the mean over replicas, which are alike.

    ``sigmas`` is of the rule "predictive"; None: the other rule, which starts micro-batches until the threshold.
    """
    return float(steps.expected_s(sigmas).mean())


def compare(
    tau_s: float | None,
    plain: TimedRun,
    dropping: TimedRun,
    measured: Segment,
    predicting: Path,
    others: Segment,
    sigmas: float | None = None,
) -> Comparison:
    """Compare what a run with a threshold (None: it chose none) measured with what was predicted for it.

    ``measured`` are the steps of both runs that are compared; ``predicting`` is the folder of the run whose steps
    ``others``, with other delays and nothing dropped, predict. ``sigmas`` as of ``expected_s``.
    """
    tau = math.inf if tau_s is None else tau_s
    known = recorded_steps(predicting, others)
    predicted, predicted_rate = _at(resampled_curve(known), tau - expected_s(known, sigmas))
    same = recorded_steps(plain[0], measured)
    searched = search_recorded(same.start_s, same.end_s, same.communication_s, expected_s=same.expected_s(sigmas))
    predicted_same, _ = _at(searched.curve, tau)
    replicas, _, micro_batches = same.start_s.shape
    share, speedup = _progress(plain, dropping, measured, replicas, micro_batches)
    return Comparison(
        tau_s=tau_s,
        own=predicting == dropping[0],
        predicted_rate=predicted_rate,
        rate=1 - share,
        predicted=predicted,
        predicted_same=predicted_same,
        speedup=speedup,
    )


def _at(curve: Curve, tau_s: float) -> tuple[float, float]:
    """Speed-up and share dropped at a threshold, interpolated linearly between those of the curve."""
    return (
        float(np.interp(tau_s, curve.thresholds_s, curve.throughput)),
        float(np.interp(tau_s, curve.thresholds_s, 1 - curve.completed_share)),
    )


def sleep_share(steps: RecordedSteps, segment: Segment, delay: Sequence[dict[str, Any]]) -> float:
    """Share of sleep, by the entries of `delay` for all ranks, in the time of recorded micro-batches of one stage.

    ``segment`` holds the numbers of the recorded steps.
    """
    replicas, _, micro_batches = steps.start_s.shape
    slept = 0.0
    for index, entry in enumerate(delay):
        spec = DelaySpec.model_validate(entry)
        for step in segment.steps:
            for replica in range(replicas):
                drawn: NDArray[np.float64] = draw_delays(spec, index, step, replica, micro_batches, 1)
                slept += float(drawn.sum())
    return slept / float(steps.end_s[:, :, -1].sum())
