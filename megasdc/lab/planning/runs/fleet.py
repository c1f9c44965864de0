"""A fleet as the planning of a run sees it: how it fails and by which cause, how that is found, and what follows.

Failures of each cause come at a constant rate of each device (Poisson) while the run trains and starts: a start that
fails is begun anew. What comes between an attempt and the next is part of the failure before. A failure costs, in turn

==========  ===========================================================================================================
detecting   seconds of its cause until the attempt has ended
waiting     for a spare, where its host is replaced and none is left; a replaced host is a spare again after a repair
deciding    until the next attempt is planned
starting    until its first step; with the number of hosts it grows by ``start_per_host_s``
recomputed  the training since the newest save that is left and right: in the host's memory; at a partner, where the
            host is replaced; else on the disk; corruption that an audit finds needs a checkpoint that an audit before
            has verified
==========  ===========================================================================================================

Corruption is found by the checks of each step, by the next audit, or never, by shares. What is never found costs no
time: it is counted apart. That a run goes on with fewer replicas is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megasdc.lab.planning.checkpoints.formulas import Intervals, best_intervals, elapsed_per_training
from megasdc.lab.planning.checkpoints.job import VERIFIED, Costs, JobModel
from megasdc.lab.planning.checkpoints.rates import CORRUPTION, FailureShares

HOUR_S = 3600.0


@dataclass(frozen=True)
class FailureCause:
    """A cause of failures.

    Args:
        name: of ``megasdc.lab.planning.checkpoints.rates.CAUSES``.
        per_device_hour: failures of a device in an hour.
        detection_s: from a failure to the end of its attempt.
        replaced: share of them after which a host is replaced.
    """

    name: str
    per_device_hour: float
    detection_s: float
    replaced: float

    def __post_init__(self) -> None:
        for field, value in (("per_device_hour", self.per_device_hour), ("detection_s", self.detection_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{field} of {self.name} is {value:g}, needed a finite number, at least 0")
        if not 0 <= self.replaced <= 1:
            raise ValueError(f"replaced of {self.name} is {self.replaced:g}, needed a share from 0 to 1")


@dataclass(frozen=True)
class Audits:
    """How corruption is found.

    Args:
        interval: steps between audits; 0: there are none.
        coverage: share of corruption that they see, of what the checks of each step do not.
        step_coverage: share that the checks of each step see, before its gradient is used.
        cost: of an audit, as a share of a step.
    """

    interval: int
    coverage: float
    step_coverage: float
    cost: float

    @property
    def slowdown(self) -> float:
        """Time of audits over that of steps."""
        return self.cost / self.interval if self.interval else 0.0

    @property
    def found(self) -> float:
        """Share of corruption that audits find."""
        return (1 - self.step_coverage) * self.coverage if self.interval else 0.0

    @property
    def missed(self) -> float:
        """Share that nothing finds."""
        return 1 - self.step_coverage - self.found


@dataclass(frozen=True)
class FailureKind:
    """Failures of one cause that are alike.

    Args:
        per_s: of the whole fleet.
        source: what the restart reads, of ``SOURCES``.
        replaced: whether a host is.
    """

    cause: str
    per_s: float
    detection_s: float
    source: str
    replaced: bool


@dataclass(frozen=True)
class Fleet:
    """Devices that train one model, and spare hosts.

    Args:
        hosts: that the run uses, all of its devices.
        costs: of steps, saves and starts, on one host; detection and verification are those of causes and audits.
        start_per_host_s: that a start takes longer with each host.
        deciding_s: from the end of an attempt to the plan of the next.
        repair_s: from the failure of a host that is replaced until it, or another, is a spare.
        fixed: steps between saves; None: those that lose least.
    """

    devices: int
    hosts: int
    causes: tuple[FailureCause, ...]
    costs: Costs
    start_per_host_s: float
    deciding_s: float
    audits: Audits
    spares: int
    repair_s: float
    fixed: Intervals | None = None

    @cached_property
    def kinds(self) -> tuple[FailureKind, ...]:
        """Failures that are found, those of no rate left out."""
        return tuple(kind for cause in self.causes for kind in self._kinds(cause) if kind.per_s > 0)

    def _kinds(self, cause: FailureCause) -> Iterator[FailureKind]:
        per_s = cause.per_device_hour * self.devices / HOUR_S
        found = {False: 1.0}  # by whether only a verified checkpoint is right
        if cause.name == CORRUPTION:
            found = {False: self.audits.step_coverage, True: self.audits.found}
        for verified, share in found.items():
            for replaced, part in ((True, cause.replaced), (False, 1 - cause.replaced)):
                source = VERIFIED if verified else self.costs.source(host_lost=replaced)
                yield FailureKind(cause.name, per_s * share * part, cause.detection_s, source, replaced)

    @property
    def per_s(self) -> float:
        """Failures in a second that are found."""
        return sum(kind.per_s for kind in self.kinds)

    @property
    def replaced_per_s(self) -> float:
        """Hosts that are replaced in a second."""
        return sum(kind.per_s for kind in self.kinds if kind.replaced)

    @property
    def missed_per_s(self) -> float:
        """Corruption in a second that nothing finds."""
        rate = sum(one.per_device_hour for one in self.causes if one.name == CORRUPTION)
        return rate * self.devices / HOUR_S * self.audits.missed

    @cached_property
    def job(self) -> JobModel:
        """The same for formulas, without the time between attempts, in which no failure comes.

        Raises:
            ValueError: it cannot make progress.
        """
        rate, costs, longer_s = self.per_s, self.costs, self.start_per_host_s * self.hosts
        older = sum(kind.per_s for kind in self.kinds if kind.source == VERIFIED)
        host = sum(kind.per_s for kind in self.kinds if kind.source != VERIFIED and kind.replaced)
        step_s = costs.step_s * (1 + self.audits.slowdown)
        costs = replace(
            costs,
            step_s=step_s,
            verification_s=self.audits.interval * step_s,
            detection_s=0.0,
            restart_memory_s=costs.restart_memory_s + longer_s,
            restart_partner_s=costs.restart_partner_s + longer_s,
            restart_disk_s=costs.restart_disk_s + longer_s,
        )
        if rate == 0:
            return JobModel(math.inf, FailureShares(0.0, 0.0), costs)
        older = min(1.0, older / rate)
        return JobModel(1 / rate, FailureShares(min(host / rate, 1 - older), older), costs)

    def check(self) -> None:
        """Refuse a fleet that no plan can be made for.

        Raises:
            ValueError: it never fails, or it cannot make progress.
        """
        if self.job.rate == 0:
            raise ValueError("the rate of all causes is 0, and a run that never fails needs no plan: give one a rate")

    @property
    def between_s(self) -> float:
        """Mean time between an attempt that fails and the next one, without that of waiting for spares."""
        detecting = sum(kind.per_s * kind.detection_s for kind in self.kinds)
        return detecting / self.per_s + self.deciding_s if self.kinds else 0.0

    @property
    def expected(self) -> float:
        """Share of the time that is training, by formula, if no failure waits for a spare.

        Raises:
            ValueError: as of ``job``.
        """
        elapsed = elapsed_per_training(self.job, self.intervals) * (1 + self.per_s * self.between_s)
        return 1 / (elapsed * (1 + self.audits.slowdown))

    @cached_property
    def intervals(self) -> Intervals:
        """Steps between saves.

        Raises:
            ValueError: as of ``job``.
        """
        return best_intervals(self.job) if self.fixed is None else self.fixed


def spares_needed(replaced_per_s: float, repair_s: float, chance: float) -> int:
    """Fewest spares of which none is left for less than ``chance`` of the hosts that are replaced.

    Hosts in repair are Poisson distributed, and so a replaced host finds them (M/G/infinity, PASTA): with N spares it
    waits if N others or more are in repair.
    """
    mean = replaced_per_s * repair_s
    if mean == 0:
        return 0
    below, count = 0.0, 0
    while 1 - below >= chance:
        below += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        count += 1
    return count
