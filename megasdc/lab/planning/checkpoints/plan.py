"""A plan of checkpoints: intervals of both kinds by every formula, and what they and others would cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from megasdc.lab.planning.checkpoints.formulas import (
    Intervals,
    best_intervals,
    daly,
    elapsed_per_training,
    exact,
    shortest_disk,
    young,
)
from megasdc.lab.planning.checkpoints.job import VERIFIED, JobModel
from megasdc.lab.planning.checkpoints.simulate import simulate_saves
from megasdc.output.page import plain_values

FACTORS = (1 / 8, 1 / 4, 1 / 2, 2, 4, 8)
"""Of the best interval of one kind: intervals that are compared with it."""
_CHANCE, _SMALL = 4, 0.02
"""Standard errors, and share of the lost time, by which formula and simulation may differ without a note."""
MEMORY_TIER, DISK_TIER = "memory", "disk"
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tier:
    """Intervals of one kind of save, in seconds of training between saves; infinite: none is worth it.

    Args:
        name: ``MEMORY_TIER`` or ``DISK_TIER``.
        share: of failures after which a restart reads it.
        stall_s: C.
        mtbf_s: M, mean time between such failures.
        young_s: Young's formula.
        daly_s: Daly's formula.
        exact_s: minimum of Daly's complete model.
        steps: whole steps, found for both kinds together; None: none.
    """

    name: str
    share: float
    stall_s: float
    mtbf_s: float
    young_s: float
    daly_s: float
    exact_s: float
    steps: int | None


@dataclass(frozen=True)
class Estimate:
    """Share of time that is training, at some intervals.

    Args:
        expected: by formula.
        simulated: None if there was no simulation.
        error: standard error of that.
    """

    intervals: Intervals
    expected: float
    simulated: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Lost:
    """Shares of time at the best intervals that are no training: saves, steps that are done again, restarts."""

    saves: float
    redone: float
    outages: float


@dataclass(frozen=True)
class CheckpointPlan:
    """A job, its best intervals, and others beside them.

    Args:
        best: least expected loss in whole steps, the disk's interval a multiple of the memory's.
        own: at the interval of a configuration; None: there is none.
        around: by the name of the tier whose interval is changed, rising.
        trials: jobs of each simulation; 0: none.
        notes: what was left out, and what to know of the result, a sentence each.
        origins: where each figure comes from, by name.
        published: source of the published figures among them; empty: there are none.
    """

    job: JobModel
    tiers: tuple[Tier, ...]
    best: Estimate
    lost: Lost
    own: Estimate | None
    around: dict[str, tuple[Estimate, ...]]
    trials: int
    notes: tuple[str, ...]
    origins: dict[str, str] = field(default_factory=dict)
    published: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible values; what is infinite is None."""
        found = plain_values(asdict(self))
        found["job"]["needs"] = self.job.needs
        return found


def plan_intervals(
    job: JobModel,
    own: tuple[int, int] | None,
    trials: int,
    seed: int,
    on_progress: OnProgress,
) -> CheckpointPlan:
    """Find the best intervals and compare them with others.

    Args:
        own: steps between snapshots in memory (0: none) and checkpoints on the disk (0: only at the end) of a
            configuration; None: there is none.
        trials: jobs of each simulation, at least 2; 0: formulas only.
        seed: of all draws.
        on_progress: called with the name of the work, how much is done, and the total.
    """
    best = best_intervals(job)
    trials = trials if job.rate else 0
    around = {tier: list(_around(job, best, tier)) for tier in (MEMORY_TIER, DISK_TIER)}
    own_intervals, told = _own(job, best, own)
    total, done = 1 + (own_intervals is not None) + sum(map(len, around.values())), 0

    def estimate(intervals: Intervals) -> Estimate:
        nonlocal done
        expected = 1 / elapsed_per_training(job, intervals)
        simulated = simulate_saves(job, intervals, trials, seed) if trials else None
        done += 1
        on_progress("intervals", done, total)
        if simulated is None:
            return Estimate(intervals, expected)
        return Estimate(intervals, expected, simulated.share, simulated.error)

    at_best = estimate(best)
    told += [*_limit(job, best), *_disagreement(job, at_best)]
    return CheckpointPlan(
        job=job,
        tiers=_tiers(job, best),
        best=at_best,
        lost=_lost(job, best, at_best.expected),
        own=None if own_intervals is None else estimate(own_intervals),
        around={tier: tuple(map(estimate, found)) for tier, found in around.items()},
        trials=trials,
        notes=tuple(told),
    )


def _tiers(job: JobModel, best: Intervals) -> tuple[Tier, ...]:
    costs, on_disk = job.costs, job.outage.on_disk
    memory = [] if costs.memory_stall_s is None else [(MEMORY_TIER, 1 - on_disk, costs.memory_stall_s, best.memory)]
    found = []
    for name, share, stall_s, steps in (*memory, (DISK_TIER, on_disk, costs.disk_stall_s, best.disk)):
        mtbf_s = job.mtbf_s / share if share > 0 else math.inf
        found.append(
            Tier(
                name=name,
                share=share,
                stall_s=stall_s,
                mtbf_s=mtbf_s,
                young_s=young(stall_s, mtbf_s),
                daly_s=daly(stall_s, mtbf_s),
                exact_s=exact(stall_s, mtbf_s),
                steps=None if steps is None else int(steps),
            )
        )
    return tuple(found)


def _lost(job: JobModel, best: Intervals, training: float) -> Lost:
    memory = best.memory or best.disk
    each_s = 0.0
    if memory is not None:
        each_s = (job.costs.memory_stall_s or 0.0) / (memory * job.costs.step_s)
    if best.disk is not None:
        each_s += job.costs.disk_stall_s / (best.disk * job.costs.step_s)
    outage = job.rate * job.outage.mean_s
    saves, outages = training * each_s, outage / (1 + outage)
    return Lost(saves=saves, redone=max(0.0, 1 - training - saves - outages), outages=outages)


def _around(job: JobModel, best: Intervals, tier: str) -> Iterator[Intervals]:
    """Intervals of which one kind has ``FACTORS`` of the best number of steps, as whole numbers allow."""
    changed = best.memory if tier == MEMORY_TIER else best.disk
    if changed is None:
        return
    told = {best}
    for factor in FACTORS:
        if tier == MEMORY_TIER:
            memory = max(1, round(changed * factor))
            disk = None if best.disk is None else max(1, round(best.disk / memory)) * memory
            found = Intervals(memory, disk)
        elif best.memory is None:
            found = Intervals(None, max(1, round(changed * factor)))
        else:
            found = Intervals(best.memory, max(1, round(changed * factor / best.memory)) * best.memory)
        if found not in told and _overlap(job, found) is None:
            told.add(found)
            yield found


def _overlap(job: JobModel, intervals: Intervals) -> float | None:
    """Fewest steps between checkpoints on the disk, where ``intervals`` has fewer; else None."""
    if intervals.disk is None:
        return None
    memory = intervals.memory or 1
    fewest = shortest_disk(job, memory) * memory
    return fewest if intervals.disk < fewest else None


def _limit(job: JobModel, best: Intervals) -> Iterator[str]:
    """What keeps the interval of the disk from being shorter."""
    memory = best.memory or 1
    fewest = shortest_disk(job, memory)
    if best.disk is not None and fewest > 1 and best.disk == fewest * memory:
        yield (
            f"a save on the disk takes as long as {best.disk:,.0f} steps until it is whole: a shorter interval, which "
            "would lose less time, needs faster saves"
        )


def _disagreement(job: JobModel, best: Estimate) -> Iterator[str]:
    """Where formula and simulation differ by more than chance and more than a small part of what is lost."""
    if best.simulated is None or best.error is None:
        return
    difference = abs(best.simulated - best.expected)
    if difference > _CHANCE * best.error and difference > _SMALL * (1 - best.simulated):
        yield (
            "formula and simulation differ: a save may be read only "
            f"{job.lags_s[VERIFIED]:,.0f} s after it was made, which is not short against the mean time between "
            f"failures of {job.mtbf_s:,.0f} s, and the formula is an approximation there; trust the simulation"
        )


def _own(job: JobModel, best: Intervals, given: tuple[int, int] | None) -> tuple[Intervals | None, list[str]]:
    """Intervals of a configuration, and what is to be told; snapshots that it lacks are about as often as is best."""
    if given is None or job.rate == 0:
        return None, []
    memory_own, own = given
    if own == 0:
        return None, ["checkpoint.interval is 0: saved only at the end, so that a failure loses all that was done"]
    memory = None if best.memory is None else own / max(1, round(own / (memory_own or best.memory)))
    found = Intervals(memory, own)
    fewest = _overlap(job, found)
    if fewest is not None:
        return None, [
            f"checkpoint.interval is {own}, but a save takes as long as {math.ceil(fewest)} steps until it is on the "
            "disk: it is not compared, since saves would wait for each other"
        ]
    return found, []
