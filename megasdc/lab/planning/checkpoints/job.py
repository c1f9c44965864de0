"""A job as the planning of its checkpoints sees it: how it fails, and what saves and restarts cost.

Failures come with a constant rate (Poisson), also while the job restarts. By what they leave, a restart reads from

- host memory: ranks died, all hosts survive;
- a partner's memory: a host was lost, and each host's snapshot has a copy on another one;
- the newest checkpoint on the disk: a host was lost and there are no copies, or there are no snapshots in memory;
- the newest verified checkpoint on the disk: corruption was found late.

A failure while the job restarts begins the restart anew, from whichever of the two needs lies further down this list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megasdc.lab.planning.checkpoints.rates import FailureShares

MEMORY, PARTNER, DISK, VERIFIED = SOURCES = ("memory", "partner", "disk", "verified disk")
"""What a restart reads from, in the order in which one need takes the place of another."""
ON_DISK = (DISK, VERIFIED)
ASSUMED: dict[str, float] = {
    "hosts": 128,
    "step_s": 10.0,
    "disk_stall_s": 10.0,
    "verification_steps": 50,
    "detection_s": 60.0,
    "restart_memory_s": 60.0,
    "restart_partner_s": 90.0,
    "restart_disk_s": 300.0,
}
"""Where nothing is given or measured; the steps are the default of `audit.interval`. Your own figures are better."""
_HOPELESS = 10
"""A restart that takes so many times the mean time between failures almost never ends: one in 22,000."""


@dataclass(frozen=True)
class Costs:
    """What saves and restarts cost, in seconds.

    Args:
        step_s: time of a step.
        memory_stall_s: that training stands still for a snapshot in host memory; None: none are made.
        partners: whether a snapshot is also copied to another host.
        disk_stall_s: that training stands still for a checkpoint on the disk.
        disk_duration_s: until that checkpoint is whole on the disk, from the begin of its save.
        verification_s: from then to the audit that verifies it.
        detection_s: from a failure to the begin of the restart.
        restart_memory_s: from then to the first new step, from a host's own memory.
        restart_partner_s: the same from a partner's.
        restart_disk_s: the same from the disk.
    """

    step_s: float
    memory_stall_s: float | None
    partners: bool
    disk_stall_s: float
    disk_duration_s: float
    verification_s: float
    detection_s: float
    restart_memory_s: float
    restart_partner_s: float
    restart_disk_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (0 <= value < math.inf):
                raise ValueError(f"{name} is {value:g}, needed a finite number of seconds, at least 0")
        if self.step_s == 0:
            raise ValueError("step_s is 0, needed the time of a step, more than 0 seconds")
        if self.disk_duration_s < self.disk_stall_s:
            raise ValueError(
                f"disk_duration_s is {self.disk_duration_s:g}, less than the disk_stall_s of {self.disk_stall_s:g}: a "
                "checkpoint is whole on the disk at the earliest when training goes on"
            )
        if self.partners and self.memory_stall_s is None:
            raise ValueError("partners hold copies of snapshots in memory, and memory_stall_s is not given: give both")

    @property
    def has_memory(self) -> bool:
        """Whether there are snapshots in host memory."""
        return self.memory_stall_s is not None

    def source(self, host_lost: bool) -> str:
        """Which of ``SOURCES`` a restart reads where the newest save is to be trusted."""
        if self.memory_stall_s is None or (host_lost and not self.partners):
            return DISK
        return PARTNER if host_lost else MEMORY

    @property
    def lag_s(self) -> float:
        """Seconds from the end of the stall of a save until it is whole on the disk."""
        return self.disk_duration_s - self.disk_stall_s

    @property
    def stalls_s(self) -> dict[str, float]:
        """Stall of each save by name, of those that are made."""
        memory = {} if self.memory_stall_s is None else {"memory_stall_s": self.memory_stall_s}
        return memory | {"disk_stall_s": self.disk_stall_s}


@dataclass(frozen=True)
class Outage:
    """Averages of one outage: from a failure to the first new step, with the failures in between.

    Args:
        mean_s: its length.
        ends: probability of each of ``SOURCES`` to be what the restart that succeeds reads from.
    """

    mean_s: float
    ends: dict[str, float]

    @property
    def on_disk(self) -> float:
        """Probability that it ends with a restart from the disk."""
        return sum(self.ends[source] for source in ON_DISK)


@dataclass(frozen=True)
class JobModel:
    """How a job fails, and what its saves and restarts cost.

    Args:
        mtbf_s: mean seconds between failures of the whole job; infinite: it never fails.
    """

    mtbf_s: float
    shares: FailureShares
    costs: Costs

    def __post_init__(self) -> None:
        if not self.mtbf_s > 0:
            raise ValueError(f"the mean time between failures is {self.mtbf_s:g} s, needed more than 0")
        for name, value in ({"step_s": self.costs.step_s} | self.costs.stalls_s).items():
            if value >= self.mtbf_s:
                raise ValueError(
                    f"{name} is {value:g} s, as long as the mean time between failures of {self.mtbf_s:g} s or longer: "
                    "such a job makes no progress"
                )
        longest = max(self.outages_s.values())
        if longest >= _HOPELESS * self.mtbf_s:
            raise ValueError(
                f"detection and restart take {longest:g} s, {_HOPELESS} times the mean time between failures of "
                f"{self.mtbf_s:g} s or more: almost no restart would end before the next failure"
            )

    @property
    def rate(self) -> float:
        """Failures in a second."""
        return 1 / self.mtbf_s

    @property
    def needs(self) -> dict[str, float]:
        """Share of failures by what a restart from them reads, of each of ``SOURCES``."""
        host, older = self.shares.host, self.shares.older
        needs = {**dict.fromkeys(SOURCES, 0.0), VERIFIED: older}
        needs[self.costs.source(host_lost=False)] += 1 - host - older
        needs[self.costs.source(host_lost=True)] += host
        return needs

    @property
    def outages_s(self) -> dict[str, float]:
        """Seconds of detection and restart that no failure interrupts, of each of ``SOURCES``."""
        costs = self.costs
        restarts = (costs.restart_memory_s, costs.restart_partner_s, costs.restart_disk_s, costs.restart_disk_s)
        return {source: costs.detection_s + restart for source, restart in zip(SOURCES, restarts, strict=True)}

    @property
    def lags_s(self) -> dict[str, float]:
        """Age that a save must have before a restart reads it, of each of ``SOURCES``, from the end of its stall."""
        lag = self.costs.lag_s
        return {MEMORY: 0.0, PARTNER: 0.0, DISK: lag, VERIFIED: lag + self.costs.verification_s}

    @cached_property
    def outage(self) -> Outage:
        """Averages of an outage, by the probabilities of the failures within it.

        A restart of R seconds succeeds with probability r = e^(-R/M); until it succeeds or fails M (1 - r) seconds pass
        on average. If it fails, the next one has the need of the new failure, where that takes the place of its own.
        """
        means: dict[str, float] = {}
        ends: dict[str, dict[str, float]] = {}
        for source in reversed(SOURCES):
            succeeds = math.exp(-self.rate * self.outages_s[source])
            fails = -math.expm1(-self.rate * self.outages_s[source])
            worse = {other: self.needs[other] for other in means}
            again = succeeds + fails * sum(worse.values())  # 1 - P(failure that changes nothing)
            spent = fails * self.mtbf_s if math.isfinite(self.mtbf_s) else self.outages_s[source]
            means[source] = (spent + fails * sum(share * means[other] for other, share in worse.items())) / again
            ends[source] = {
                end: ((succeeds if end == source else 0.0) + fails * sum(worse[o] * ends[o][end] for o in worse))
                / again
                for end in SOURCES
            }
        return Outage(
            mean_s=sum(self.needs[source] * means[source] for source in SOURCES),
            ends={end: sum(self.needs[source] * ends[source][end] for source in SOURCES) for end in SOURCES},
        )
