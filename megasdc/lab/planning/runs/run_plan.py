"""A plan of a run on a fleet: its effective training time, where the rest goes, spares, and what raises it most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from megasdc.lab.planning.checkpoints.formulas import Intervals
from megasdc.lab.planning.checkpoints.rates import HOST
from megasdc.lab.planning.runs.fleet import Fleet, spares_needed
from megasdc.lab.planning.runs.measured import Prediction
from megasdc.lab.planning.runs.simulation import LOST, SimulatedRuns, simulate_runs

DAY_S = 86_400.0
PARTS = ("training", "checking", "paused", *LOST)
"""Parts of the time: steps that count, audits, saves, and what failures cost."""
MEMORY_STALL = 0.02
"""Stall of a snapshot in memory as a share of a step, where a plan without them is compared with one that has them."""
_SIZES = 12
"""Numbers of devices of the curve."""
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CauseLoss:
    """What the failures of a cause cost, or the first start.

    Args:
        failures: of a run, on average.
        lost: share of the time by the names in ``LOST``.
    """

    name: str
    failures: float
    lost: dict[str, float]


@dataclass(frozen=True)
class Spares:
    """Spare hosts.

    Args:
        needed: that ``chance`` asks for, by formula.
        chance: of a replaced host to find none, at most.
        in_repair: hosts on average.
        replaced: hosts of a run, on average.
        waited: share of these that found no spare, simulated with the fleet's own number.
    """

    needed: int
    chance: float
    in_repair: float
    replaced: float
    waited: float


@dataclass(frozen=True)
class Investment:
    """One change of the fleet.

    Args:
        name: what is changed.
        training: share of the time that is training then.
        gain: in that share.
        error: standard error of the gain; both fleets saw the same draws.
    """

    name: str
    training: float
    gain: float
    error: float


@dataclass(frozen=True)
class RunPlan:
    """What a run on a fleet would come to.

    Args:
        days: of the run.
        trials: simulated runs.
        intervals: steps between saves.
        training: effective training time: share of the time that is training that counts.
        error: standard error of that.
        low: that 5 % of the simulated runs are below.
        high: that 5 % are above.
        expected: by formula, if no failure waits for a spare.
        parts: shares of the time by the names in ``PARTS``.
        causes: what each costs.
        missed: corruptions of a run that nothing finds, expected; they are in no part of the time.
        investments: best first.
        sizes: (devices, expected) of the same fleet at other sizes; None: no progress.
        predictions: of the supervised runs that pieces were taken from.
        notes: what to know of the result, a sentence each.
        origins: where each figure comes from, by name.
        published: source of the published figures among them; empty: there are none.
    """

    fleet: Fleet
    days: float
    trials: int
    intervals: Intervals
    training: float
    error: float
    low: float
    high: float
    expected: float
    parts: dict[str, float]
    causes: tuple[CauseLoss, ...]
    spares: Spares
    missed: float
    investments: tuple[Investment, ...]
    sizes: tuple[tuple[int, float | None], ...]
    predictions: tuple[Prediction, ...] = ()
    notes: tuple[str, ...] = ()
    origins: dict[str, str] = field(default_factory=dict)
    published: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        found = asdict(self)
        found["predictions"] = [
            {**one, "shares": prediction.shares}
            for one, prediction in zip(found["predictions"], self.predictions, strict=True)
        ]
        return found


def make_run_plan(fleet: Fleet, days: float, chance: float, trials: int, seed: int, on_progress: OnProgress) -> RunPlan:
    """Simulate runs on a fleet, and on the same with each investment.

    Args:
        days: of a run.
        chance: of a replaced host to find no spare, that ``Spares.needed`` is for.
        trials: simulated runs of each.
        seed: of all draws.

    Raises:
        ValueError: it makes no progress, or never fails.
    """
    fleet.check()
    others = list(investments(fleet))
    wall_s = days * DAY_S
    on_progress("fleets", 0, len(others) + 1)
    runs = simulate_runs(fleet, trials, seed, wall_s)
    training = _training(fleet, runs)
    found = []
    for number, (name, other) in enumerate(others, 1):
        on_progress("fleets", number, len(others) + 1)
        changed = _training(other, simulate_runs(other, trials, seed, wall_s))
        gains = changed - training
        found.append(Investment(name, float(changed.mean()), float(gains.mean()), _error(gains)))
    on_progress("fleets", len(others) + 1, len(others) + 1)
    low, high = np.quantile(training, (0.05, 0.95))
    replaced = int(runs.replaced.sum())
    return RunPlan(
        fleet=fleet,
        days=days,
        trials=trials,
        intervals=fleet.intervals,
        training=float(training.mean()),
        error=_error(training),
        low=float(low),
        high=float(high),
        expected=fleet.expected,
        parts=_parts(fleet, runs),
        causes=tuple(_causes(runs)),
        spares=Spares(
            needed=spares_needed(fleet.replaced_per_s, fleet.repair_s, chance),
            chance=chance,
            in_repair=fleet.replaced_per_s * fleet.repair_s,
            replaced=replaced / trials,
            waited=float(runs.waited.sum()) / replaced if replaced else 0.0,
        ),
        missed=fleet.missed_per_s * wall_s * (1 - _parts(fleet, runs)["waiting"]),
        investments=tuple(sorted(found, key=lambda one: -one.gain)),
        sizes=tuple(_sizes(fleet)),
    )


def investments(fleet: Fleet) -> Iterator[tuple[str, Fleet]]:
    """The same fleet with one thing better, by what that is."""
    costs, audits = fleet.costs, fleet.audits
    causes = [replace(one, detection_s=one.detection_s / 2) for one in fleet.causes]
    yield "failures detected in half the time", replace(fleet, causes=tuple(causes))
    starts = {name: getattr(costs, name) / 2 for name in ("restart_memory_s", "restart_partner_s", "restart_disk_s")}
    faster = replace(fleet, start_per_host_s=fleet.start_per_host_s / 2, deciding_s=fleet.deciding_s / 2)
    yield "decisions and starts in half the time", replace(faster, costs=replace(costs, **starts))
    if not costs.has_memory:
        with_memory = replace(costs, memory_stall_s=MEMORY_STALL * costs.step_s)
        yield "snapshots in host memory", replace(fleet, costs=with_memory, fixed=None)
        with_partners = replace(with_memory, partners=True)
        yield "the same, with copies at partners", replace(fleet, costs=with_partners, fixed=None)
    elif not costs.partners:
        yield "copies of snapshots at partners", replace(fleet, costs=replace(costs, partners=True), fixed=None)
    if costs.disk_stall_s:
        yield (
            "saves on the disk stall half as long",
            replace(fleet, costs=replace(costs, disk_stall_s=costs.disk_stall_s / 2)),
        )
    if audits.interval > 1:
        yield "audits twice as often", replace(fleet, audits=replace(audits, interval=math.ceil(audits.interval / 2)))
    yield "one more spare", replace(fleet, spares=fleet.spares + 1)
    if fleet.repair_s:
        yield "repairs in half the time", replace(fleet, repair_s=fleet.repair_s / 2)
    if any(one.name == HOST and one.per_device_hour for one in fleet.causes):
        causes = [
            replace(one, per_device_hour=one.per_device_hour / 2) if one.name == HOST else one for one in fleet.causes
        ]
        yield "hosts that fail half as often", replace(fleet, causes=tuple(causes))


def _training(fleet: Fleet, runs: SimulatedRuns) -> np.ndarray:
    """Share of the time that is training that counts, without audits, [run]."""
    return runs.trained_s / runs.wall_s / (1 + fleet.audits.slowdown)


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _parts(fleet: Fleet, runs: SimulatedRuns) -> dict[str, float]:
    wall_s, slowdown = runs.wall_s.mean(), fleet.audits.slowdown
    trained = float(runs.trained_s.mean() / wall_s)
    lost = runs.lost_s.sum(axis=1).mean(axis=0) / wall_s
    kept = {
        "training": trained / (1 + slowdown),
        "checking": trained * slowdown / (1 + slowdown),
        "paused": float(runs.paused_s.mean() / wall_s),
    }
    return kept | dict(zip(LOST, lost.tolist(), strict=True))


def _causes(runs: SimulatedRuns) -> Iterator[CauseLoss]:
    """Causes in their order; kinds of one together."""
    lost = runs.lost_s.mean(axis=0) / runs.wall_s.mean()
    failures = runs.failures.mean(axis=0)
    for name in dict.fromkeys(runs.causes):
        places = [place for place, cause in enumerate(runs.causes) if cause == name]
        parts = dict(zip(LOST, lost[places].sum(axis=0).tolist(), strict=True))
        yield CauseLoss(name, float(failures[places].sum()), parts)


def _sizes(fleet: Fleet) -> Iterator[tuple[int, float | None]]:
    """The formula for a tenth to ten times the devices, with the intervals that are best there."""
    per_host = fleet.devices / fleet.hosts
    for hosts in np.unique(
        np.geomspace(max(1, fleet.hosts / 10), fleet.hosts * 10, _SIZES).round().astype(int)
    ).tolist():
        other = replace(fleet, devices=round(hosts * per_host), hosts=hosts, fixed=None)
        try:
            yield other.devices, other.expected
        except ValueError:
            yield other.devices, None
