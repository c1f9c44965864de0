"""Choice of the threshold from a run's own steps, and compensation for dropped micro-batches.

Times are gathered once, then every rank makes the same search. Compensation, by more steps or larger batches: Giladi et
al., arXiv 2306.10598, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megasdc.config.drop_compute import largest_batch
from megasdc.dropcompute.gate import expected_time_s
from megasdc.dropcompute.threshold import Curve, extra_steps_share, search_recorded
from megasdc.engine.step_times import StepRecord
from megasdc.parallel.dims import ParallelDims

TOLERANCE = 0.01
"""Share of the planned micro-batches that a larger batch may fail to complete."""
AIM_RANGE = 0.1
"""Share of the planned micro-batches by which a step may aim at more or fewer of them."""
REPAID_IN_STEPS = 10
"""Number of steps in which a larger batch makes up for too few or too many micro-batches of earlier steps."""


def extra_steps(dropped: int, per_step: int) -> int:
    """Number of additional steps after which as many micro-batches are completed as were planned, rounded up.

    Args:
        dropped: number of micro-batches dropped so far, over all replicas.
        per_step: number of micro-batches planned in one step, over all replicas.
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
        micro_batches: number M' of planned micro-batches.
        tau_s: the threshold; infinite if nothing is to be gained: M' is then M.
        completed: number of micro-batches that a replica completes in a step, mean over the recorded steps.
        compute_s: compute time of a step's slowest replica, mean over the recorded steps.
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
        start_s: start of each micro-batch on the first stage in steps in which nothing was dropped, [replica, step,
            micro-batch], seconds since the step began.
        end_s: end of the backward pass of each on the first stage, same shape and origin.
        stages: number of stages of the pipeline.
        max_drop_rate: largest share (M' - M) / M' of the planned micro-batches.
        min_micro_batches: number of micro-batches that every replica starts in every step.
        expected_s: seconds before the threshold by which a micro-batch must be started, [replica].
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

    Times that were not recorded are taken from the same replica's next steps: the times between the starts of
    micro-batches while the pipeline is full. So a replica that is slow stays slow.

    Args:
        start_s: starts, [replica, step, micro-batch], seconds since the step began.
        end_s: ends, same shape and origin.
        micro_batches: number of micro-batches of a step of the result, at least as many as recorded.
        stages: number of stages of the pipeline.
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
    """Keeps the completed work equal to the planned work: later steps make up for too few or too many micro-batches.

    Args:
        wanted: number of micro-batches that a replica is to complete in a step, on average.
        replicas: number of replicas.
        aims: ``aims`` of the chosen ``LargerBatch``; empty: it is not chosen yet, or drops nothing.
        owed: number of micro-batches that all replicas together still have to make up for; negative: too many were
            completed.
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


Seconds = NDArray[np.float64]


def measured_communication_s(compute_s: Seconds, step_s: Seconds) -> float:
    """Tc: time of a step beyond the compute time of its slowest replica, mean over the steps, at least 0.

    Args:
        compute_s: end of each replica's micro-batches on its first stage (whose last backward pass is the replica's
            last), [replica, step].
        step_s: end of its optimizer's step, [replica, step].
    """
    rest = step_s.mean(axis=0) - compute_s.max(axis=0)
    return max(0.0, math.fsum(rest) / len(rest))


def expected_times_s(start_s: Seconds, end_s: Seconds, sigmas: float | None) -> Seconds:
    """Duration that each replica expects of its next micro-batch, [replica]; 0 where ``sigmas`` is None.

    Args:
        start_s: starts, [replica, step, micro-batch], seconds.
        end_s: ends, same shape.
        sigmas: see ``ClockDecisions``.
    """
    if sigmas is None:
        return np.zeros(len(start_s))
    return np.array([expected_time_s(one.ravel().tolist(), sigmas) for one in end_s - start_s])


@dataclass(frozen=True)
class RecordedSteps:
    """Times of steps in which nothing was dropped, of the first stage of every replica, in seconds.

    Args:
        start_s: start of each micro-batch, [replica, step, micro-batch].
        end_s: end of its backward pass, [replica, step, micro-batch].
        compute_s: end of a replica's micro-batches, [replica, step].
        step_s: end of its optimizer's step, [replica, step].
        stages: number of stages of the pipeline.
        forward_end_s: end of each micro-batch's forward pass, [replica, step, micro-batch]; None: not known.
    """

    start_s: Seconds
    end_s: Seconds
    compute_s: Seconds
    step_s: Seconds
    stages: int = 1
    forward_end_s: Seconds | None = None

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
            tau_s: the threshold.
            min_micro_batches: number of micro-batches that are always started.
            sigmas: see ``ClockDecisions``.
        """
        latest_s = (tau_s - self.expected_s(sigmas))[:, None, None]
        return float((self.start_s[:, :, min_micro_batches:] >= latest_s).sum() / self.start_s.size)


@dataclass(frozen=True)
class Tuning:
    """The chosen threshold and its figures.

    Args:
        tau_s: the threshold; infinite: dropping gains nothing.
        drop_rate: share of micro-batches that tau drops in the steps from which it was chosen.
        speedup: S_eff in these steps; None where the threshold was given.
        communication_s: measured Tc.
        curve: figures of all thresholds; None where the threshold was given, and for a larger batch.
        micro_batches: number of micro-batches to plan in a step of a replica.
        aims: see ``LargerBatch``.
        not_started: share of micro-batches that tau drops, without ended backward passes; None: none can end.
    """

    tau_s: float
    drop_rate: float
    speedup: float | None
    communication_s: float
    curve: Curve | None
    micro_batches: int
    aims: tuple[tuple[float, float], ...] = ()
    not_started: float | None = None

    @property
    def completed(self) -> float:
        """Number of micro-batches that a replica completes in a step, mean over the steps it was chosen from."""
        return self.micro_batches * (1 - self.drop_rate)


class TimeWindow:
    """Collects the times of ``length`` steps, of so many micro-batches of this replica each.

    ``passes_end``: whether backward passes may end, so that the ends of forward passes are collected, too.
    """

    def __init__(self, length: int, micro_batches: int, dims: ParallelDims, *, passes_end: bool = False) -> None:
        self._length, self._micro_batches, self._dims = length, micro_batches, dims
        self._passes_end = passes_end
        self._rows: list[list[float]] = []

    @property
    def is_full(self) -> bool:
        """Whether all steps of the window have been added."""
        return len(self._rows) == self._length

    def add(self, record: StepRecord) -> None:
        """Add a step; only those of the deciding ranks are used."""
        forward_ends = record.forward_end_s if self._passes_end else []
        self._rows.append([*record.start_s, *record.end_s, *forward_ends, record.compute_s, record.step_s])

    def gather(self, group: dist.ProcessGroup) -> RecordedSteps:
        """The times of all replicas, in seconds.

        Collective: the group, a host group of all ranks; one sum of [replicas, steps, 2 M + 2] numbers, 3 M + 2 where
        backward passes may end.
        """
        dims, number = self._dims, self._micro_batches
        width = (3 if self._passes_end else 2) * number + 2
        table = torch.zeros(dims.data, self._length, width, dtype=torch.float64)
        if dims.is_first_stage and dims.tp_rank == 0:
            table[dims.dp_rank] = torch.tensor(self._rows, dtype=torch.float64)
        dist.all_reduce(table, group=group)
        times = table.numpy()
        starts, ends = times[:, :, :number], times[:, :, number : 2 * number]
        forward_ends = times[:, :, 2 * number : 3 * number] if self._passes_end else None
        return RecordedSteps(starts, ends, times[:, :, -2], times[:, :, -1], dims.pipeline, forward_ends)


def tune(
    steps: RecordedSteps,
    tau_s: float | None,
    max_drop_rate: float,
    min_micro_batches: int,
    sigmas: float | None = None,
    layers: int = 0,
) -> Tuning:
    """The threshold of the largest effective speed-up; the same on every rank that gives the same times.

    Args:
        steps: times of the steps from which it is chosen.
        tau_s: a given threshold; None: it is searched for.
        max_drop_rate: largest share of micro-batches that may be dropped.
        min_micro_batches: number of micro-batches that every replica starts.
        sigmas: see ``ClockDecisions``.
        layers: see ``search_recorded``; of a given threshold, 0.
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
        layers=layers,
        forward_ends_s=steps.forward_end_s,
    )
    not_started = steps.drop_rate(found.tau_s, min_micro_batches, sigmas) if layers else None
    return Tuning(
        found.tau_s, found.drop_rate, found.speedup, communication_s, found.curve, planned, not_started=not_started
    )


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
