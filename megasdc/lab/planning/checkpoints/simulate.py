"""Simulation of jobs that fail, restart and go on: event by event, all jobs at once; knows nothing of the formulas.

A job trains in segments, each of which ends with a snapshot; after a number of segments the snapshot is also saved on
the disk. Failures come at exponential times and each has a need, one of ``SOURCES``. What a failure interrupts is lost:
the segment, a checkpoint that is not whole on the disk yet, a restart. A checkpoint is verified when an audit comes
after it; an audit of a later stretch verifies what was on the disk at its begin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasdc.lab.planning.checkpoints.formulas import Intervals
from megasdc.lab.planning.checkpoints.job import ON_DISK, PARTNER, SOURCES, VERIFIED, JobModel

FAILURES = 400
"""Failures of each simulated job."""
_NEVER = 1 << 40
"""Segments between checkpoints on the disk where none are made."""
_ROUNDING = 1e-12
_PARTNER, _VERIFIED = SOURCES.index(PARTNER), SOURCES.index(VERIFIED)
Places = NDArray[np.int64]
"""Segments that are done, of each job."""


@dataclass(frozen=True)
class Simulated:
    """Seconds of training that count over seconds that pass: of all jobs together, and its standard error."""

    share: float
    error: float


@dataclass
class Jobs:
    """Jobs that restart: places of the newest snapshot, checkpoint on the disk and verified one, each of [job].

    Args:
        need: what the restart reads, by index of ``SOURCES``, [job].
    """

    memory: Places
    disk: Places
    verified: Places
    need: NDArray[np.int64]

    @property
    def restart(self) -> Places:
        """Where each job goes on after its outage."""
        on_disk = np.where(self.need == _VERIFIED, self.verified, self.disk)
        return np.where(self.need <= _PARTNER, self.memory, on_disk)

    def failed(self, after: Jobs, up: NDArray[np.bool_], need: NDArray[np.int64]) -> Jobs:
        """The jobs after one more failure.

        Args:
            after: what they have saved since the restart.
            up: whether it ended before this failure, which else begins it anew from what lies further down, [job].
            need: of this failure, [job].
        """
        return Jobs(
            memory=np.where(up, after.memory, self.memory),
            disk=np.where(up, after.disk, self.disk),
            verified=np.where(up, after.verified, self.verified),
            need=np.where(up, need, np.maximum(need, self.need)),
        )


@dataclass(frozen=True)
class Schedule:
    """When which save is made.

    Args:
        training_s: training of a segment.
        segment_s: the same with the snapshot in memory.
        segments: between saves on the disk.
        cycle_s: so many segments with the stall of that save.
    """

    training_s: float
    segment_s: float
    segments: int
    cycle_s: float

    @classmethod
    def of(cls, job: JobModel, intervals: Intervals) -> Schedule:
        """That of a job at some intervals, of which at least one is not None."""
        memory = intervals.memory or intervals.disk
        if memory is None:
            raise ValueError("nothing is saved: no share of training to simulate")
        segments = _NEVER if intervals.disk is None else round(intervals.disk / memory)
        training_s = memory * job.costs.step_s
        segment_s = training_s + (job.costs.memory_stall_s or 0.0)
        return cls(training_s, segment_s, segments, segments * segment_s + job.costs.disk_stall_s)

    def after(self, start: Places, ran_s: NDArray[np.float64]) -> Places:
        """Segments done after so many seconds without a failure."""
        cycles, segments = np.divmod(start, self.segments)
        more, rest = np.divmod(segments * self.segment_s + np.maximum(ran_s, 0), self.cycle_s)
        done = np.minimum(rest // self.segment_s, self.segments - 1)
        return np.maximum(start, (cycles + more.astype(np.int64)) * self.segments + done.astype(np.int64))

    def trained_s(self, start: Places, ran_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Training of so many seconds without a failure: the time that no save took, [job]."""
        first = start % self.segments
        cycles, rest = np.divmod(first * self.segment_s + ran_s, self.cycle_s)
        done = np.minimum(rest // self.segment_s, self.segments - 1)
        last_s = np.minimum(rest - done * self.segment_s, self.training_s)
        trained_s: NDArray[np.float64] = last_s + self.training_s * (cycles * self.segments + done - first)
        return trained_s

    def needed_s(self, start: Places, trained_s: float) -> NDArray[np.float64]:
        """Seconds without a failure until so much training is done, counted from the begin of the job, [job]."""
        whole = math.ceil(trained_s / self.training_s * (1 - _ROUNDING)) - 1  # segments that end before
        memory_s = (whole - start) * (self.segment_s - self.training_s)
        disk_s = (whole // self.segments - start // self.segments) * (self.cycle_s - self.segments * self.segment_s)
        return trained_s - start * self.training_s + memory_s + disk_s

    def on_disk(self, start: Places, ran_s: NDArray[np.float64], before: Places) -> Places:
        """Newest place saved on the disk in these seconds, else ``before``."""
        place = self.after(start, ran_s) // self.segments * self.segments
        return np.where(place > start, place, before)


def simulate_saves(job: JobModel, intervals: Intervals, trials: int, seed: int) -> Simulated:
    """Share of time that is training, simulated.

    Args:
        job: fails at times.
        intervals: of saves; at least one is not None.
        trials: number of jobs, at least 2, each with ``FAILURES`` failures.
        seed: of all draws; the same failures come at other intervals.
    """
    schedule = Schedule.of(job, intervals)
    draws = np.random.default_rng(seed)
    outages_s = np.array([job.outages_s[source] for source in SOURCES])
    needs = list(job.needs.values())

    def fail() -> NDArray[np.int64]:
        return draws.choice(len(SOURCES), size=trials, p=needs)

    elapsed_s = np.zeros(trials)
    nothing = np.zeros(trials, dtype=np.int64)
    jobs = Jobs(nothing, nothing, nothing, fail())
    for _ in range(FAILURES):
        gaps_s = draws.exponential(job.mtbf_s, trials)
        elapsed_s += gaps_s
        outage_s = outages_s[jobs.need]
        up = gaps_s >= outage_s
        after = stretch(job, schedule, jobs, gaps_s - outage_s)
        need = fail()
        jobs = jobs.failed(after, up, need)
    trained_s = jobs.restart * schedule.training_s
    share = float(trained_s.sum() / elapsed_s.sum())
    spread = (trained_s - share * elapsed_s).std(ddof=1) / elapsed_s.mean()
    return Simulated(share, float(spread / math.sqrt(trials)))


def stretch(job: JobModel, schedule: Schedule, jobs: Jobs, ran_s: NDArray[np.float64]) -> Jobs:
    """The jobs after a restart and so many seconds until the next failure."""
    start = jobs.restart
    before = np.where(jobs.need == _VERIFIED, jobs.verified, jobs.disk)  # newer ones are set aside
    disk_lag, verified_lag = (job.lags_s[source] for source in ON_DISK)
    audited = np.where(ran_s >= job.costs.verification_s, before, jobs.verified)
    return Jobs(
        memory=schedule.after(start, ran_s),
        disk=schedule.on_disk(start, ran_s - disk_lag, before),
        verified=schedule.on_disk(start, ran_s - verified_lag, audited),
        need=jobs.need,
    )
