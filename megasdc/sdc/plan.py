"""Detection latency and cost of the checks: formulas, and a simulation that is independent of them.

One rank is bad from some step on: each micro-batch that it computes is wrong - has at least one wrong result - with the
same probability, its *rate*, independently of the others. A step has M micro-batches, so with rate p a step has a wrong
one with probability 1 - (1 - p)^M. Latency is counted in steps, from the first step of the bad rank to the one whose
check detects it, both included: 1 means at once.

- An audit sees the first micro-batch of every K-th step. The rank turns bad at any of the K steps from one audit to the
  next with equal probability, so the first audit is in step (K + 1) / 2 on average; it and each later one finds it with
  probability p, so 1 / p - 1 more are needed: K (1 / p - 1) + (K + 1) / 2 = K (1 / p - 1 / 2) + 1 / 2. With a permuted
  replay one replica suffices, for errors that stay at a unit; each then costs a micro-batch more.
- The check of every step compares forward results with their recomputation on the same rank, of one micro-batch of a
  step, another each step, or of all. It detects a share of the wrong micro-batches: no errors of the backward pass,
  and none that the recomputation repeats. With share v: 1 / (v p) steps, and 1 / (1 - (1 - v p)^M) for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.addresses import FORWARD, MICRO_BATCH_PHASES, RECOMPUTE
from megasdc.sdc.cost import Reads, Work, reads_of_step

AUDIT, ONE, ALL = "audit", "always_on one", "always_on all"
TIERS = (AUDIT, ONE, ALL)
"""Tiers by the sections that switch them on; one, all: `sdc.always_on.coverage`."""
_MOST = 1 << 16
"""Largest number of wrong micro-batches that a trial of the simulation draws at once."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a run and cost of its checks.

    Args:
        replicas: N, that share the audited micro-batch.
        interval: K, steps from one audit to the next.
        micro_batches: M, of a step of each replica.
        visible: v, share of wrong micro-batches that the check of every step can detect.
        audit_share: time of the checksums of all results of a micro-batch over the time of that micro-batch.
        forward_share: the same for its forward and recomputed results alone.
        permuted: time of a permuted replay over that of a micro-batch; 0: audits have none.
    """

    replicas: int
    interval: int
    micro_batches: int
    visible: float
    audit_share: float
    forward_share: float
    permuted: float = 0.0

    def overhead(self, tier: str) -> float:
        """Time of a tier's checksums and replays, as a share of the time of all steps."""
        if tier == AUDIT:
            replay = self.permuted + self.audit_share if self.permuted else 0.0
            return (self.audit_share + replay) / (self.micro_batches * self.interval)
        return self.forward_share / (self.micro_batches if tier == ONE else 1)

    def samples_lost(self, tier: str) -> float:
        """Share of a run's samples lost to redundant computation on other replicas: at most 1 / (M K)."""
        if tier != AUDIT:
            return 0.0
        return (self.replicas - 1) / (self.replicas * self.micro_batches * self.interval)


@dataclass(frozen=True)
class Latency:
    """Steps until a tier detects a bad rank.

    Args:
        tier: one of ``TIERS``.
        rate: probability that a micro-batch of the bad rank is wrong.
        expected: by formula; infinite if the tier never detects it.
        simulated: mean of the simulation; None if there was none.
        error: standard error of that mean.
    """

    tier: str
    rate: float
    expected: float
    simulated: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class PlanResult:
    """A plan, the latencies of each tier at each rate, and the number of trials of each simulation."""

    plan: Plan
    latencies: tuple[Latency, ...]
    trials: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible values; an infinite latency is None."""
        return {
            "plan": asdict(self.plan),
            "tiers": {
                tier: {"overhead": self.plan.overhead(tier), "samples_lost": self.plan.samples_lost(tier)}
                for tier in TIERS
            },
            "latencies": [
                asdict(one) | {"expected": one.expected if math.isfinite(one.expected) else None}
                for one in self.latencies
            ],
            "trials": self.trials,
        }


def expected_latency(plan: Plan, tier: str, rate: float) -> float:
    """Expected steps until a tier detects a bad rank, by the formulas of the module; infinite if it never does.

    ``rate`` is the probability that a micro-batch of the bad rank is wrong, in (0, 1].
    """
    if tier == AUDIT:
        sees = plan.replicas > 1 or plan.permuted
        return plan.interval * (1 / rate - 0.5) + 0.5 if sees else math.inf
    seen = plan.visible * rate
    if tier == ALL:
        seen = 1.0 if seen == 1 else -math.expm1(plan.micro_batches * math.log1p(-seen))
    return 1 / seen if seen else math.inf


def largest_interval(latency: float, rate: float) -> int | None:
    """The largest K whose audits detect a rank of this rate within so many steps on average.

    Args:
        latency: wanted expected steps.
        rate: probability that a micro-batch of the bad rank is wrong, in (0, 1].

    Returns:
        K; None if even audits of every step take longer: 1 / rate steps.
    """
    interval = math.floor((latency - 0.5) / (1 / rate - 0.5) * (1 + 1e-12))  # tolerance for rounding
    return interval if interval >= 1 else None


def simulate_latency(plan: Plan, tier: str, rate: float, trials: int, seed: int) -> NDArray[np.int64]:
    """Simulated steps, [trials], until a tier detects a bad rank whose micro-batches are wrong at this rate, in (0, 1].

    Only the rules are simulated: which micro-batches are wrong, which are checked, and whether their errors are
    visible. Needs at least two replicas and a visible share above 0.
    """
    draws = np.random.default_rng([seed, TIERS.index(tier), int(np.float64(rate).view(np.uint64))])
    return np.array([_one_trial(plan, tier, rate, draws) for _ in range(trials)], dtype=np.int64)


def _one_trial(plan: Plan, tier: str, rate: float, draws: np.random.Generator) -> int:
    until_audit = int(draws.integers(plan.interval))  # steps from the first of the bad rank to the next audit
    about = 2 * plan.micro_batches * (plan.interval if tier == AUDIT else 1)  # wrong ones until one is detected
    size = min(about, _MOST)
    last = -1
    while True:
        wrong = last + np.cumsum(draws.geometric(rate, size=size))  # indices of the wrong micro-batches
        step, micro_batch = np.divmod(wrong, plan.micro_batches)
        if tier == AUDIT:
            seen = (micro_batch == 0) & ((step - until_audit) % plan.interval == 0)
        else:
            seen = draws.random(size) < plan.visible
            if tier == ONE:
                seen &= micro_batch == step % plan.micro_batches
        if seen.any():
            return int(step[np.argmax(seen)]) + 1
        last = wrong[-1]


def make_plan(
    plan: Plan, rates: Sequence[float], trials: int, seed: int, on_progress: Callable[[str, int, int], None]
) -> PlanResult:
    """Latency of every tier at every rate.

    Args:
        rates: probabilities that a micro-batch of the bad rank is wrong, in (0, 1].
        trials: of each simulation; 0: formulas only.
        on_progress: called with the name of the work, how much is done, and the total.
    """
    latencies: list[Latency] = []
    for tier in TIERS:
        for rate in rates:
            latency = Latency(tier, rate, expected_latency(plan, tier, rate))
            if trials and math.isfinite(latency.expected):
                steps = simulate_latency(plan, tier, rate, trials, seed)
                error = float(steps.std(ddof=1) / math.sqrt(trials)) if trials > 1 else None
                latency = replace(latency, simulated=float(steps.mean()), error=error)
            latencies.append(latency)
            on_progress("rates and tiers", len(latencies), len(TIERS) * len(rates))
    return PlanResult(plan, tuple(latencies), trials)


def checksum_shares(
    work: Work, audit: str, always_on: str, *, bytes_per_s: float, flop_per_s: float, call_s: float
) -> tuple[float, float]:
    """Time of one micro-batch's checksums over the time of that micro-batch, by the cost model.

    Args:
        audit: granularity of audits, a key of ``GRANULARITIES``.
        always_on: granularity of the check of every step.
        bytes_per_s: at which a checksum reads.
        flop_per_s: that a step reaches.
        call_s: seconds that each checksum costs whatever its size.

    Returns:
        ``Plan.audit_share`` and ``Plan.forward_share``.
    """
    shares = []
    for granularity, phases in ((audit, MICRO_BATCH_PHASES), (always_on, (FORWARD, RECOMPUTE))):
        by_phase = reads_of_step(work, granularity)
        reads = sum((by_phase[phase] for phase in phases), Reads(0, 0))
        shares.append((reads.bytes / bytes_per_s + reads.count * call_s) / (work.flops / flop_per_s))
    return shares[0], shares[1]
