"""Imbalance of replicas: time lost to waiting, its causes, and the part that dropping micro-batches can recover.

T_n is the time at which replica n has computed its micro-batches, U_n that time minus the garbage collection of its
stage that collected longest. A step loses max T - mean T: it would be shorter by that if all replicas were equally
fast. The mean of this loss over steps is divided into

- garbage collection: the loss of T minus the loss of U;
- the deterministic part: the largest of the replicas' mean U minus the mean of all, the cost of the replica that is
  slowest on average in every step;
- the random part: the rest, which is never negative. Dropping helps against this part alone: a replica that is always
  late would lose samples in every step.

What a threshold cut short does not show the time that was needed: ended backward passes are left out of the time of a
micro-batch, and steps with drops out of what is compared with eq. 3.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.dropcompute.threshold import exact_longest, longest_density
from megasdc.lab.report.step_times import StepTimesOfRun
from megasdc.output.page import plain_values

LITTLE = 0.01
"""Share of a step below which a loss is not worth a remedy."""
MOST_BINS = 40
"""Maximum of bins of a histogram."""


@dataclass(frozen=True)
class ReplicaTimes:
    """Times of one replica over the steps: mean, standard deviation, median, 99th percentile and maximum of T.

    ``last_steps``: steps in which all others waited for it; ``waiting_share``: time that it waited for the slowest
    replica, over the time of all steps; ``busy_s``: of a micro-batch's forward and backward pass, [stage], NaN if no
    backward pass was whole.
    """

    replica: int
    hosts: tuple[str, ...]
    mean_s: float
    std_s: float
    p50_s: float
    p99_s: float
    max_s: float
    last_steps: int
    waiting_share: float
    busy_s: tuple[float, ...]


@dataclass(frozen=True)
class WaitingTime:
    """Seconds of a step that are lost to waiting, mean over steps, in the parts that the module describes.

    ``garbage_s`` is below 0 if collection made replicas more equal. ``slowest``: the replica that is slowest on average
    without it; ``stage``: where its micro-batches exceed the mean of all replicas most, by ``stage_excess_s`` each.
    """

    total_s: float
    deterministic_s: float
    garbage_s: float
    random_s: float
    slowest: int
    stage: int
    stage_excess_s: float


@dataclass(frozen=True)
class SlowestReplica:
    """Time of the slowest replica of each step, as measured, and as eq. 3 predicts it for replicas that are alike.

    The prediction takes a replica's time as normal, with mean ``replica_mean_s`` and deviation ``replica_std_s`` of all
    replicas together. ``mean_s``, ``expected_s``: mean over steps, and the expectation. ``edges_s``: of the bins of the
    histogram, [bin + 1]; ``measured``, ``predicted``: mean densities in a bin and in its middle, in 1 / s, [bin]; the
    latter is empty where all times are equal. ``steps``: number of the steps without drops, of which all this is.
    """

    mean_s: float
    expected_s: float
    replica_mean_s: float
    replica_std_s: float
    edges_s: tuple[float, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    steps: int


@dataclass(frozen=True)
class TimesReport:
    """Times of a run's steps and their loss to waiting.

    ``compute_s``: T, [replica, step]; ``step_s``: mean time of a step; ``replicas``: by index; ``slowest``: None if
    there is no step without drops.
    """

    times: StepTimesOfRun
    compute_s: NDArray[np.float64]
    step_s: float
    replicas: tuple[ReplicaTimes, ...]
    loss: WaitingTime
    slowest: SlowestReplica | None

    @property
    def steps_with_drops(self) -> int:
        """Steps in which a replica dropped micro-batches or ended a backward pass; their times are shorter by that."""
        return int((~self.times.is_whole).any(axis=0).sum())

    @property
    def advice(self) -> str:
        """One sentence: the largest cause of waiting, and whether dropping helps."""
        loss, share = self.loss, self.loss.total_s / self.step_s
        if len(self.replicas) == 1:
            return "One replica: it waits for no other, and dropping gains nothing."
        if share < LITTLE:
            return f"Replicas lose {share:.1%} of a step to waiting for the slowest: dropping has little to gain."
        parts = {"random": loss.random_s, "deterministic": loss.deterministic_s, "garbage": loss.garbage_s}
        largest = max(parts, key=lambda name: parts[name])
        of_loss = f"{parts[largest] / loss.total_s:.0%} of the {share:.1%} of a step that is lost to waiting"
        if largest == "garbage":
            return (
                f'{of_loss} comes from garbage collection: set megasdc.training.garbage_collection "managed" before '
                "you think of dropping."
            )
        if largest == "deterministic":
            host = self.times.hosts[loss.slowest][loss.stage]
            return (
                f"{of_loss} comes from replica {loss.slowest} (stage {loss.stage}, {host}), slower on average: "
                "dropping would give up its samples step after step; look at its hardware and its share of the work."
            )
        return (
            f"{of_loss} is random: dropping can win back up to about {loss.random_s / self.step_s:.1%} of a step; "
            "`megasdc dropcompute threshold` says how much, and what is dropped for it."
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        times = self.times
        found = {
            "run": str(times.run),
            "steps": {"first": int(times.steps[0]), "last": int(times.steps[-1]), "count": len(times.steps)},
            "steps_with_drops": self.steps_with_drops,
            "ended_passes": int(times.ended.sum()),
            "stages": times.start_s.shape[1],
            "step_s": self.step_s,
            "replicas": [asdict(replica) for replica in self.replicas],
            "loss": asdict(self.loss),
            "slowest": None if self.slowest is None else asdict(self.slowest),
            "advice": self.advice,
            "notes": list(times.notes),
        }
        return plain_values(found)


def report_times(times: StepTimesOfRun) -> TimesReport:
    """Computes times and losses of the recorded steps, at least one."""
    compute, whole = times.compute_s.max(axis=1), times.is_whole.all(axis=0)
    busy = mean_of_known(times.busy_of_whole_s, (2, 3))
    steps = times.step_s.max(axis=(0, 1))
    waiting = (compute.max(axis=0) - compute).sum(axis=1) / steps.sum()
    last = np.bincount(compute.argmax(axis=0), minlength=len(compute))
    replicas = tuple(
        ReplicaTimes(
            number,
            times.hosts[number],
            float(own.mean()),
            float(own.std()),
            float(np.percentile(own, 50)),
            float(np.percentile(own, 99)),
            float(own.max()),
            int(last[number]),
            float(waiting[number]),
            tuple(busy[number].tolist()),
        )
        for number, own in enumerate(compute)
    )
    loss = _divide(compute, times.gc_s.max(axis=1), busy)
    return TimesReport(times, compute, float(steps.mean()), replicas, loss, _slowest(compute[:, whole]))


def _slowest(compute: NDArray[np.float64]) -> SlowestReplica | None:
    if not compute.size:
        return None
    longest, mean, std = compute.max(axis=0), float(compute.mean()), float(compute.std())
    bins = min(MOST_BINS, max(1, round(math.sqrt(longest.size))))
    measured, edges = np.histogram(longest, bins, density=True)
    middles = (edges[1:] + edges[:-1]) / 2
    predicted = longest_density(middles, len(compute), mean, std).tolist() if std > 0 else []
    expected = exact_longest(len(compute), mean, std)
    return SlowestReplica(
        float(longest.mean()),
        expected,
        mean,
        std,
        tuple(edges.tolist()),
        tuple(measured.tolist()),
        tuple(predicted),
        longest.size,
    )


def _divide(compute: NDArray[np.float64], collected: NDArray[np.float64], busy: NDArray[np.float64]) -> WaitingTime:
    total, without = _lost(compute), compute - collected
    means = without.mean(axis=1)
    slowest = int(means.argmax())
    deterministic = float(means[slowest] - means.mean())
    excess = busy[slowest] - mean_of_known(busy, 0)
    stage = int(excess.argmax())  # where passes are ended there is but one
    rest = _lost(without)
    return WaitingTime(total, deterministic, total - rest, rest - deterministic, slowest, stage, float(excess[stage]))


def mean_of_known(values: NDArray[np.float64], axes: int | tuple[int, ...]) -> NDArray[np.float64]:
    """Mean over axes of the values that are not NaN; NaN where all are."""
    known = np.isfinite(values)
    number = known.sum(axis=axes)
    total = np.where(known, values, 0.0).sum(axis=axes)
    return np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)


def _lost(seconds: NDArray[np.float64]) -> float:
    return float((seconds.max(axis=0) - seconds.mean(axis=0)).mean())
