"""The pieces of supervised runs: how long starts, detection and decisions took; and what the model makes of them.

A prediction is of a run with so many failures by cause, so many of which met a start, of so many seconds of training
that count, with its steps and the intervals of its saves. When failures come and what is recomputed follow from the
model: predicted is the mean of simulated runs with as many failures. Pieces of other runs make it one of a run that
nothing but its failures is known of.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasdc.common.errors import DataError
from megasdc.config.sections import MegasdcSection
from megasdc.events import read_events
from megasdc.lab.planning.checkpoints.formulas import Intervals
from megasdc.lab.planning.checkpoints.job import Costs
from megasdc.lab.planning.checkpoints.rates import CORRUPTION, HANG, HOST, NETWORK, SOFTWARE, STORAGE
from megasdc.lab.planning.runs.fleet import HOUR_S, Audits, FailureCause, Fleet
from megasdc.lab.planning.runs.simulation import (
    DECIDING,
    DETECTING,
    LOST,
    RECOMPUTED,
    STARTING,
    SimulatedRuns,
    simulate_runs,
)
from megasdc.ops.supervise.goodput import WELL, AttemptTime, goodput_of
from megasdc.ops.supervise.policy import Action

CAUSE_OF = {
    "host_lost": HOST,
    "link": NETWORK,
    "hang": HANG,
    "stuck": HANG,
    "storage": STORAGE,
    "checkpoint": STORAGE,
    "corrupt": CORRUPTION,
    "corrupt_again": CORRUPTION,
    "corrupt_once": CORRUPTION,
    "corrupt_one_of": CORRUPTION,
}
"""Cause of each kind of diagnosis; of the others it is ``SOFTWARE``."""
PRODUCTIVE, PAUSED, OTHER = "productive", "paused", "other"
PARTS = (PRODUCTIVE, RECOMPUTED, PAUSED, STARTING, DETECTING, DECIDING, OTHER)
"""Parts of a run's time that a prediction knows; ``OTHER`` is as it was measured."""
_LOST = (RECOMPUTED, PAUSED, STARTING, DETECTING, DECIDING)
"""Those that are simulated."""
_PART_OF = {
    "productive": PRODUCTIVE,
    "recomputed": RECOMPUTED,
    "evaluating": PAUSED,
    "saving": PAUSED,
    "starting": STARTING,
    "loading": STARTING,
    "detecting": DETECTING,
    "deciding": DECIDING,
}
"""Of the parts of ``megasdc.ops.supervise.goodput``; of the others it is ``OTHER``."""
_TRIALS, _KEPT = 20_000, 2_000
"""Simulated runs of a prediction, and those of them, nearest in the number of failures, that it is made of."""


@dataclass(frozen=True)
class Pieces:
    """What attempts took.

    Args:
        attempts: of one run or several.
    """

    attempts: Sequence[AttemptTime]

    @property
    def failed(self) -> Sequence[AttemptTime]:
        """Attempts that failed."""
        return [one for one in self.attempts if one.ended is not None and one.ended not in WELL]

    @property
    def early(self) -> int:
        """Of these, that had not taken a step."""
        return sum(one.resumed is None for one in self.failed)

    @property
    def starts(self) -> Sequence[AttemptTime]:
        """Attempts that took a step."""
        return [one for one in self.attempts if one.resumed is not None]

    @property
    def start_s(self) -> float:
        """Mean time of a start that reached its first step."""
        return statistics.mean(attempt_parts(one)[STARTING] for one in self.starts)

    @property
    def deciding_s(self) -> float | None:
        """Mean time from the end of an attempt that failed to the next plan; None: none failed."""
        return statistics.mean(attempt_parts(one)[DECIDING] for one in self.failed) if self.failed else None

    @property
    def detection_s(self) -> dict[str, float]:
        """Mean time of detection by cause, of attempts that had taken a step."""
        found: dict[str, list[float]] = {}
        for one in self.failed:
            if one.resumed is not None:
                found.setdefault(cause_of(one), []).append(attempt_parts(one)[DETECTING])
        return {cause: statistics.mean(seconds) for cause, seconds in found.items()}


@dataclass(frozen=True)
class Measured:
    """A supervised run.

    Args:
        path: of its folder.
        pieces: its attempts.
        write_s: until a checkpoint was on the disk, from the begin of its save; None: none was measured.
    """

    path: Path
    pieces: Pieces
    write_s: float | None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the names in ``PARTS``."""
        attempts = [attempt_parts(one) for one in self.pieces.attempts]
        return {part: sum(one[part] for one in attempts) for part in PARTS}

    @property
    def exposed_s(self) -> float:
        """Seconds in which it started and trained, so that failures could come."""
        parts = self.parts
        return sum(parts[part] for part in (PRODUCTIVE, RECOMPUTED, PAUSED, STARTING))

    @property
    def failures(self) -> dict[str, int]:
        """Attempts that failed, by cause."""
        return dict(Counter(map(cause_of, self.pieces.failed)))

    @property
    def steps(self) -> int:
        """Of all attempts together, also those that were taken again."""
        return sum((one.last or 0) - (one.resumed or 0) for one in self.pieces.starts)


@dataclass(frozen=True)
class Prediction:
    """What the model says of a run, and what the run was.

    Args:
        path: of its folder.
        others: whether starts, detection and decisions are those of other runs.
        failures: of the run, by cause.
        early: of these, that met a start.
        predicted: seconds by the names in ``PARTS``.
        measured: the same of the run.
        low: share of productive time that 5 % of the simulated runs are below: when failures come is chance.
        high: that 5 % are above.
    """

    path: str
    others: bool
    failures: dict[str, int]
    early: int
    predicted: dict[str, float]
    measured: dict[str, float]
    low: float
    high: float

    @property
    def shares(self) -> tuple[float, float]:
        """Predicted and measured share of the time that is productive."""
        return shares_of([self])


def shares_of(predictions: Sequence[Prediction]) -> tuple[float, float]:
    """Predicted and measured share of the time of runs, all together, that is productive."""
    sides = [one.predicted for one in predictions], [one.measured for one in predictions]
    shares = [sum(one[PRODUCTIVE] for one in side) / sum(sum(one.values()) for one in side) for side in sides]
    return shares[0], shares[1]


def cause_of(attempt: AttemptTime) -> str:
    """Cause of an attempt that failed."""
    return CAUSE_OF.get(attempt.ended or "", SOFTWARE)


def attempt_parts(attempt: AttemptTime) -> dict[str, float]:
    """Seconds of an attempt by the names in ``PARTS``."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, seconds in attempt.parts.items():
        found[_PART_OF.get(name, OTHER)] += seconds
    return found


def measure_run(run_dir: Path, now: float) -> Measured:
    """The pieces of a supervised run, also while it runs.

    Args:
        now: seconds since the epoch.

    Raises:
        DataError: it was not supervised, or its journal tells of no step that it kept.
        StorageError: its journal was changed, or cannot be read.
    """
    found = goodput_of(run_dir, now)
    if found is None:
        raise DataError(f"{run_dir} has no journal of `megasdc supervise`; give the folder of a supervised run")
    if not found.parts["productive"]:
        raise DataError(
            f"{run_dir}: its journal tells of no step that it kept, so that there is nothing to measure; give a run "
            "that has trained under `megasdc supervise`"
        )
    written = [one.fields["duration_s"] for one in read_events(run_dir, kind="save") if "duration_s" in one.fields]
    return Measured(
        path=run_dir,
        pieces=Pieces(found.attempts),
        write_s=statistics.median(written) if written else None,
    )


def pieces_for(run: Measured, runs: Sequence[Measured]) -> tuple[Pieces, bool]:
    """Those of all other runs, where they tell what the run needs, else its own; and whether they are of others."""
    others = Pieces(tuple(attempt for one in runs if one is not run for attempt in one.pieces.attempts))
    tells = bool(others.starts) and run.failures.keys() <= others.detection_s.keys()
    return (others, True) if tells else (run.pieces, False)


def predict_run(run: Measured, pieces: Pieces, others: bool, sections: MegasdcSection, seed: int) -> Prediction:
    """What the model makes of a run.

    Args:
        pieces: starts, detection and decisions to count with.
        others: whether they are of other runs.
        sections: its configuration: intervals of saves and audits.
        seed: of all draws.

    Raises:
        ValueError: the model can make no progress with them.
    """
    runs = simulate_runs(_fleet(run, pieces, sections), _TRIALS, seed, training_s=run.parts[PRODUCTIVE])
    other_s = run.parts[OTHER]
    lost = dict(zip(LOST, runs.lost_s.sum(axis=1).T, strict=True)) | {PAUSED: runs.paused_s}
    seconds, spread = _at_failures(runs, run.pieces, np.stack([lost[part] for part in _LOST], axis=1))
    found = {**dict(zip(_LOST, seconds, strict=True)), PRODUCTIVE: run.parts[PRODUCTIVE], OTHER: other_s}
    wall_s = sum(found.values())
    low, high = np.quantile(run.parts[PRODUCTIVE] / (wall_s + spread), (0.05, 0.95))
    return Prediction(
        path=str(run.path),
        others=others,
        failures=run.failures,
        early=run.pieces.early,
        predicted={part: found[part] for part in PARTS},
        measured=run.parts,
        low=float(low),
        high=float(high),
    )


def _at_failures(runs: SimulatedRuns, pieces: Pieces, seconds: np.ndarray) -> tuple[list[float], np.ndarray]:
    """Seconds of parts, [run, part], of a run with as many failures, in starts and later, as there were.

    By linear regression over the simulated runs whose numbers are nearest; few may have just these.

    Returns:
        Seconds of each part, and by how much all of them together differ between runs, [run].
    """
    wanted = np.array([1, pieces.early, len(pieces.failed) - pieces.early])
    counts = np.stack([np.ones(len(seconds)), runs.early, runs.failures.sum(axis=1) - runs.early], axis=1)
    kept = np.argsort(abs(counts - wanted).sum(axis=1), kind="stable")[:_KEPT]
    slopes = np.linalg.lstsq(counts[kept], seconds[kept], rcond=None)[0]
    spread = (seconds[kept] - counts[kept] @ slopes).sum(axis=1)
    return (wanted @ slopes).tolist(), spread


def _fleet(run: Measured, pieces: Pieces, sections: MegasdcSection) -> Fleet:
    """The hosts of a run, as they were measured."""
    memory, disk = sections.checkpoint.memory.interval, sections.checkpoint.interval
    if not (memory or disk):
        disk = sections.training.steps  # saved at the end
    memory = min(memory, disk) if disk else memory  # a snapshot that is rarer than checkpoints restores nothing newer
    parts, audits, detection_s = run.parts, sections.audit, pieces.detection_s
    stall_s = parts[PAUSED] / run.steps * (disk or memory)
    hours = run.exposed_s / HOUR_S
    replaced = Counter(cause_of(one) for one in run.pieces.failed if one.decided == Action.REPLACE.value)
    causes = [
        FailureCause(name, count / hours, detection_s.get(name, 0.0), replaced[name] / count)
        for name, count in run.failures.items()
    ]
    costs = Costs(
        step_s=(parts[PRODUCTIVE] + parts[RECOMPUTED]) / run.steps,
        memory_stall_s=(0.0 if disk else stall_s) if memory else None,
        partners=bool(memory) and sections.checkpoint.memory.partners is not False,
        disk_stall_s=stall_s if disk else 0.0,
        disk_duration_s=max(stall_s, run.write_s or 0.0) if disk else 0.0,
        verification_s=0.0,
        detection_s=0.0,
        restart_memory_s=pieces.start_s,
        restart_partner_s=pieces.start_s,
        restart_disk_s=pieces.start_s,
    )
    return Fleet(
        devices=1,  # all of them: rates are those of the run
        hosts=1,
        causes=tuple(causes),
        costs=costs,
        start_per_host_s=0.0,
        deciding_s=pieces.deciding_s or 0.0,
        audits=Audits(audits.interval, 1.0, 0.0, 0.0) if audits.enabled else Audits(0, 0.0, 1.0, 0.0),
        spares=0,
        repair_s=0.0,  # what it has waited for hosts is in the time of its decisions
        fixed=Intervals(memory or None, disk or None),
    )
