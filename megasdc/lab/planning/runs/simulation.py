"""Simulation of runs on a fleet, failure by failure, all runs at once.

Places of saves, and what a restart reads, are those of ``megasdc.lab.planning.checkpoints.simulate``; here hosts are
replaced from spares, each cause has its time of detection, and every second of a run has a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasdc.lab.planning.checkpoints.job import SOURCES
from megasdc.lab.planning.checkpoints.simulate import Jobs, Schedule, stretch
from megasdc.lab.planning.runs.fleet import Fleet

FIRST_START = "first start"
"""In place of a cause: no failure came before it."""
LOST = RECOMPUTED, WAITING, DETECTING, DECIDING, STARTING = (
    "recomputed",
    "waiting",
    "detecting",
    "deciding",
    "starting",
)
"""Parts of the time that a failure costs."""

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class SimulatedRuns:
    """Simulated runs.

    Args:
        causes: of the second axis of ``lost_s``; the last one is ``FIRST_START``.
        wall_s: of each run, [run].
        trained_s: training that counts, with its audits, [run].
        paused_s: saves for which training stood still, [run].
        lost_s: by kind of failure and part of ``LOST``, [run, kind, part].
        failures: by kind, [run, kind].
        early: failures that came before a start had reached its first step, [run].
        replaced: hosts, [run].
        waited: of these, that found no spare, [run].
    """

    causes: tuple[str, ...]
    wall_s: Floats
    trained_s: Floats
    paused_s: Floats
    lost_s: Floats
    failures: Whole
    early: Whole
    replaced: Whole
    waited: Whole


@dataclass(frozen=True)
class _Kinds:
    """Kinds of failures, and last the first start, as arrays, [kind]; ``below``: rising shares that choose one."""

    below: Floats
    detection_s: Floats
    deciding_s: Floats
    source: Whole
    replaced: NDArray[np.bool_]

    @classmethod
    def of(cls, fleet: Fleet) -> _Kinds:
        kinds = fleet.kinds
        first = SOURCES.index(fleet.costs.source(host_lost=False))
        return cls(
            below=np.cumsum([kind.per_s for kind in kinds])[:-1] / (fleet.per_s or 1.0),
            detection_s=np.array([*(kind.detection_s for kind in kinds), 0.0]),
            deciding_s=np.array([*(fleet.deciding_s for _ in kinds), 0.0]),
            source=np.array([*(SOURCES.index(kind.source) for kind in kinds), first]),
            replaced=np.array([*(kind.replaced for kind in kinds), False]),
        )


class _Spares:
    """Spare hosts of runs: the host that is replaced takes the place of the one replaced ``spares`` before it."""

    def __init__(self, fleet: Fleet, runs: int) -> None:
        self._repair_s, self._spares = fleet.repair_s, fleet.spares
        self._back_s = np.zeros((runs, max(1, fleet.spares)))  # when each of the last ones is a spare again
        self._rows = np.arange(runs)
        self.replaced = np.zeros(runs, dtype=np.int64)
        self.waited = np.zeros(runs, dtype=np.int64)

    def acquire(self, now_s: Floats, wanted: NDArray[np.bool_]) -> Floats:
        """Seconds until a spare is there, for runs that replace a host now; 0 for the others."""
        place = self.replaced % len(self._back_s[0])
        own_s = now_s + self._repair_s
        free_s = self._back_s[self._rows, place] if self._spares else own_s
        wait_s = np.where(wanted, np.maximum(free_s - now_s, 0.0), 0.0)
        self._back_s[self._rows, place] = np.where(wanted, own_s, self._back_s[self._rows, place])
        self.replaced += wanted
        self.waited += wait_s > 0
        return wait_s


def simulate_runs(
    fleet: Fleet, trials: int, seed: int, wall_s: float = math.inf, training_s: float = math.inf
) -> SimulatedRuns:
    """Simulate runs until a time, or until they are done.

    Args:
        fleet: that fails at times.
        trials: number of runs.
        seed: of all draws; fleets of as many kinds of failures see the same ones.
        wall_s: seconds of a run; at least one of both is finite.
        training_s: seconds of training after which it is done.

    Raises:
        ValueError: nothing is saved, or no progress can be made.
    """
    run = _Simulation(fleet, trials, wall_s, training_s)
    draws = np.random.default_rng(seed)
    while run.runs.any():
        run.until_failure(draws.exponential(fleet.job.mtbf_s, trials), draws.random(trials))
    return SimulatedRuns(
        causes=(*(one.cause for one in fleet.kinds), FIRST_START),
        wall_s=run.now_s,
        trained_s=run.trained_s,
        paused_s=run.paused_s,
        lost_s=run.lost_s,
        failures=run.failures,
        early=run.early,
        replaced=run.spares.replaced,
        waited=run.spares.waited,
    )


class _Simulation:
    """Runs under way, [run]; arguments as of ``simulate_runs``."""

    def __init__(self, fleet: Fleet, trials: int, wall_s: float, training_s: float) -> None:
        self._job, self._kinds, self.spares = fleet.job, _Kinds.of(fleet), _Spares(fleet, trials)
        self._schedule, self._wall_s, self._training_s = Schedule.of(fleet.job, fleet.intervals), wall_s, training_s
        self._start_s = np.array([self._job.outages_s[source] for source in SOURCES])
        self._rows, self._first = np.arange(trials), len(fleet.kinds)
        self._kind, nothing = np.full(trials, self._first), np.zeros(trials, dtype=np.int64)
        self._jobs = Jobs(nothing, nothing, nothing, self._kinds.source[self._kind])
        self._wait_s = np.zeros(trials)
        self.runs = np.full(trials, True)
        self.now_s, self.trained_s, self.paused_s = (np.zeros(trials) for _ in range(3))
        self.lost_s = np.zeros((trials, self._first + 1, len(LOST)))
        self.failures = np.zeros((trials, self._first + 1), dtype=np.int64)
        self.early = np.zeros(trials, dtype=np.int64)

    def until_failure(self, gap_s: Floats, choice: Floats) -> None:
        """Go on until the next failure, or the end.

        Args:
            gap_s: seconds of starting and training until then.
            choice: which failure, from 0 to 1.
        """
        jobs, rows, schedule = self._jobs, self._rows, self._schedule
        left_s, spent = np.where(self.runs, self._wall_s - self.now_s, 0.0), []
        for seconds in (self._wait_s, self._kinds.detection_s[self._kind], self._kinds.deciding_s[self._kind]):
            spent.append(np.minimum(seconds, left_s))
            left_s = left_s - spent[-1]
        fails = gap_s < left_s
        ran_s = np.minimum(gap_s, left_s)
        spent.append(np.minimum(self._start_s[jobs.need], ran_s))
        ran_s = ran_s - spent[-1]
        if math.isfinite(self._training_s):
            needed_s = np.where(self.runs, schedule.needed_s(jobs.restart, self._training_s), 0.0)
            fails &= ran_s < needed_s
            ran_s = np.minimum(ran_s, needed_s)
        self.lost_s[rows, self._kind, 1:] += np.stack(spent, axis=1)
        self.now_s += sum(spent) + ran_s
        before_s = jobs.restart * schedule.training_s
        trained_s = schedule.trained_s(jobs.restart, ran_s)
        self.paused_s += np.where(self.runs, ran_s - trained_s, 0.0)
        self.trained_s = np.where(self.runs, before_s + trained_s, self.trained_s)
        self._fail(fails, stretch(self._job, schedule, jobs, ran_s), ran_s > 0, choice)

    def _fail(self, fails: NDArray[np.bool_], after: Jobs, up: NDArray[np.bool_], choice: Floats) -> None:
        """Let a failure come to some of them, and end the others."""
        drawn = np.searchsorted(self._kinds.below, choice, side="right")
        jobs = self._jobs.failed(after, up, self._kinds.source[drawn])
        again_s = self.trained_s - jobs.restart * self._schedule.training_s
        self.lost_s[self._rows, drawn, 0] += np.where(fails, again_s, 0.0)
        self.failures[self._rows, drawn] += fails
        self.early += fails & ~up
        self._wait_s = self.spares.acquire(self.now_s, fails & self._kinds.replaced[drawn])
        self._jobs, self._kind = jobs, drawn
        self.runs = self.runs & fails
