"""Choice of the compute threshold from a run's own steps: times gathered once, then the same search on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megasdc.dropcompute.compensation import choose_larger_batch, mean_longest
from megasdc.dropcompute.decisions import expected_time_s
from megasdc.dropcompute.search import Curve, search_recorded
from megasdc.engine.step_times import StepRecord
from megasdc.parallel.dims import ParallelDims

Seconds = NDArray[np.float64]


def measured_communication_s(compute_s: Seconds, step_s: Seconds) -> float:
    """Tc: what a step takes beyond the compute time of its slowest replica, mean over the steps, at least 0.

    Args:
        compute_s: when each replica's micro-batches had ended on its first stage (whose last backward pass is the
            replica's last), [replica, step].
        step_s: when its optimizer was done, [replica, step].
    """
    rest = step_s.mean(axis=0) - compute_s.max(axis=0)
    return max(0.0, math.fsum(rest) / len(rest))


def expected_times_s(start_s: Seconds, end_s: Seconds, sigmas: float | None) -> Seconds:
    """Duration that each replica expects of its next micro-batch, [replica]; 0 where ``sigmas`` is None.

    Args:
        start_s: [replica, step, micro-batch], seconds.
        end_s: likewise.
        sigmas: see ``ClockDecisions``.
    """
    if sigmas is None:
        return np.zeros(len(start_s))
    return np.array([expected_time_s(one.ravel().tolist(), sigmas) for one in end_s - start_s])


@dataclass(frozen=True)
class RecordedSteps:
    """Times of steps in which nothing was dropped, of the first stage of every replica, in seconds.

    Args:
        start_s: [replica, step, micro-batch].
        end_s: likewise.
        compute_s: when a replica's micro-batches had ended, [replica, step].
        step_s: when its optimizer was done, [replica, step].
        stages: of the pipeline.
    """

    start_s: Seconds
    end_s: Seconds
    compute_s: Seconds
    step_s: Seconds
    stages: int = 1

    @property
    def communication_s(self) -> float:
        """Tc of these steps."""
        return measured_communication_s(self.compute_s, self.step_s)

    def expected_s(self, sigmas: float | None) -> Seconds:
        """Duration that each replica expects of a micro-batch after these steps, [replica]; 0 if ``sigmas`` is None."""
        return expected_times_s(self.start_s, self.end_s, sigmas)

    def drop_rate(self, tau_s: float, min_micro_batches: int, sigmas: float | None = None) -> float:
        """Share of the micro-batches that a threshold would have dropped.

        Args:
            min_micro_batches: that are always started.
            sigmas: see ``ClockDecisions``.
        """
        latest_s = (tau_s - self.expected_s(sigmas))[:, None, None]
        return float((self.start_s[:, :, min_micro_batches:] >= latest_s).sum() / self.start_s.size)


@dataclass(frozen=True)
class Tuning:
    """The chosen threshold and its figures.

    Args:
        tau_s: infinite: dropping gains nothing.
        drop_rate: share dropped at tau in the steps it was chosen from.
        speedup: S_eff there; None where the threshold was given.
        communication_s: Tc that was measured.
        curve: None where the threshold was given, and for a larger batch.
        micro_batches: to plan in a step of a replica.
        aims: see ``LargerBatch``.
    """

    tau_s: float
    drop_rate: float
    speedup: float | None
    communication_s: float
    curve: Curve | None
    micro_batches: int
    aims: tuple[tuple[float, float], ...] = ()

    @property
    def completed(self) -> float:
        """Micro-batches that a replica completes in a step, mean over the steps it was chosen from."""
        return self.micro_batches * (1 - self.drop_rate)


class TimeWindow:
    """Collects the times of ``length`` steps, of so many micro-batches of this replica each."""

    def __init__(self, length: int, micro_batches: int, dims: ParallelDims) -> None:
        self._length, self._micro_batches, self._dims = length, micro_batches, dims
        self._rows: list[list[float]] = []

    @property
    def is_full(self) -> bool:
        """Whether all steps of the window have been added."""
        return len(self._rows) == self._length

    def add(self, record: StepRecord) -> None:
        """Add a step; only those of the deciding ranks are used."""
        self._rows.append([*record.start_s, *record.end_s, record.compute_s, record.step_s])

    def gather(self, group: dist.ProcessGroup) -> RecordedSteps:
        """The times of all replicas, in seconds.

        Collective: the group, a host group of all ranks; one sum of [replicas, steps, 2 M + 2] numbers.
        """
        dims, number = self._dims, self._micro_batches
        table = torch.zeros(dims.data, self._length, 2 * number + 2, dtype=torch.float64)
        if dims.is_first_stage and dims.tp_rank == 0:
            table[dims.dp_rank] = torch.tensor(self._rows, dtype=torch.float64)
        dist.all_reduce(table, group=group)
        times = table.numpy()
        starts, ends = times[:, :, :number], times[:, :, number : 2 * number]
        return RecordedSteps(starts, ends, times[:, :, -2], times[:, :, -1], dims.pipeline)


def tune(
    steps: RecordedSteps,
    tau_s: float | None,
    max_drop_rate: float,
    min_micro_batches: int,
    sigmas: float | None = None,
) -> Tuning:
    """The threshold of the largest effective speed-up; the same on every rank that gives the same times.

    Args:
        tau_s: a given threshold; None: it is searched for.
        min_micro_batches: that every replica starts.
        sigmas: see ``ClockDecisions``.
    """
    communication_s, planned = steps.communication_s, steps.start_s.shape[2]
    if tau_s is not None:
        rate = steps.drop_rate(tau_s, min_micro_batches, sigmas)
        return Tuning(tau_s, rate, None, communication_s, None, planned)
    found = search_recorded(
        steps.start_s,
        steps.end_s,
        communication_s,
        max_drop_rate,
        min_micro_batches,
        expected_s=steps.expected_s(sigmas),
    )
    return Tuning(found.tau_s, found.drop_rate, found.speedup, communication_s, found.curve, planned)


def tune_larger_batch(
    steps: RecordedSteps,
    tau_s: float | None,
    max_drop_rate: float,
    min_micro_batches: int,
    sigmas: float | None = None,
) -> Tuning:
    """The larger batch and threshold with which as many micro-batches are completed as were planned, fastest.

    Args:
        tau_s: a given threshold, which may be lowered; it stays, without a larger batch, where it drops nothing or no
            batch completes enough. None: any.

    See ``tune`` for the others.
    """
    if tau_s is not None and not steps.drop_rate(tau_s, min_micro_batches, sigmas):
        return tune(steps, tau_s, max_drop_rate, min_micro_batches, sigmas)
    latest_s = math.inf if tau_s is None else tau_s
    chosen = choose_larger_batch(
        steps.start_s, steps.end_s, steps.stages, max_drop_rate, min_micro_batches, steps.expected_s(sigmas), latest_s
    )
    planned, communication_s = steps.start_s.shape[2], steps.communication_s
    if tau_s is not None and chosen.micro_batches == planned:
        return tune(steps, tau_s, max_drop_rate, min_micro_batches, sigmas)
    plain_s = mean_longest(steps.end_s[:, :, -1]) + communication_s
    return Tuning(
        chosen.tau_s,
        1 - chosen.completed / chosen.micro_batches,
        chosen.completed / planned * plain_s / (chosen.compute_s + communication_s),
        communication_s,
        None,
        chosen.micro_batches,
        chosen.aims,
    )
