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
  step, another each step, or of all, or as a budget leaves room for (``megasdc.sdc.budget``): of m micro-batches in
  every E-th step. It detects a share v of the wrong micro-batches: no errors of the backward pass, and none that the
  recomputation repeats. A step that looks finds the rank with probability q = 1 - (1 - v p)^m; by the argument of
  audits that takes E (1 / q - 1 / 2) + 1 / 2 steps.
- Sums of rows look at one of P products of one micro-batch in every E-th step. Of a rank that gets one product of a
  wrong micro-batch wrong, any of them, q = p / P.
- Slices of the optimizer are one of n in every E-th step. Of a rank that gets one element of its shard wrong in a step
  with probability p, anywhere, q = p / n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.common.addresses import FORWARD, MICRO_BATCH_PHASES, PARAMETER, RECOMPUTE
from megasdc.sdc.cost import (
    FP32_BYTES,
    Cadence,
    RankWork,
    Reads,
    TimeShares,
    choose_cadence,
    reads_of_row_sums,
    reads_of_step,
)

AUDIT, ONE, ALL, AUTO = "audit", "always_on one", "always_on all", "always_on auto"
ROWS, SLICES = "rows", "slices"
TIERS = (AUDIT, ONE, ALL, AUTO, ROWS, SLICES)
"""Tiers by the settings that switch them on; one, all, auto: `sdc.always_on.coverage`."""
SLICE_ELEMENTS, SLICE_CALLS = 16_384, 60
"""Elements of a slice in the cost model, and operations on so many."""
ONE_A_STEP = Cadence(1)
_MOST = 1 << 16
"""Largest number of wrong micro-batches that a trial of the simulation draws at once."""


@dataclass(frozen=True)
class AuditPlan:
    """Sizes of a run and cost of its checks.

    Args:
        replicas: N, that share the audited micro-batch.
        interval: K, steps from one audit to the next.
        micro_batches: M, of a step of each replica.
        visible: v, share of wrong micro-batches that the check of every step can detect.
        audit_share: time of the checksums of all results of a micro-batch over the time of that micro-batch.
        forward_share: the same for its forward and recomputed results alone.
        permuted: time of a permuted replay over that of a micro-batch; 0: audits have none.
        extra: whether audits compute a micro-batch more, instead of one of the step's.
        cadence: of the checks with a budget.
        products: P, that rows of are summed in turn.
        slices: n, of the largest shard.
        row_share: time of the sums of one product over that of a micro-batch.
        slice_share: time of the checks of one slice over that of a step.
    """

    replicas: int
    interval: int
    micro_batches: int
    visible: float
    audit_share: float
    forward_share: float
    permuted: float = 0.0
    cadence: Cadence = ONE_A_STEP
    products: int = 1
    slices: int = 1
    row_share: float = 0.0
    slice_share: float = 0.0
    extra: bool = False

    def within(self, budget: float, fixed_share: float) -> AuditPlan:
        """The same with the cadence that keeps all checks within a share of a step.

        Args:
            fixed_share: what checks take in every step, whatever they look at, as a share of its time.
        """
        look, also = self.forward_share / self.micro_batches, self.row_share / self.micro_batches + self.slice_share
        shares = TimeShares(fixed_share, self.overhead(AUDIT), look, also)
        return replace(self, cadence=choose_cadence(shares, budget, self.micro_batches))

    def looks(self, tier: str) -> tuple[Cadence, float]:
        """When a tier looks, and the chance that it sees a wrong micro-batch, or step, that it looks at."""
        own, sees = self.cadence, self.replicas > 1 or self.permuted
        return {
            AUDIT: (Cadence(1, self.interval), 1.0 if sees else 0.0),
            ONE: (Cadence(1), self.visible),
            ALL: (Cadence(self.micro_batches), self.visible),
            AUTO: (own, self.visible),
            ROWS: (Cadence(1, own.every), 1 / self.products),
            SLICES: (Cadence(1, own.every), 1 / self.slices),
        }[tier]

    def overhead(self, tier: str) -> float:
        """Time of a tier's checksums, replays and extra micro-batches, as a share of the time of all steps."""
        if tier == SLICES:
            return self.slice_share / self.cadence.every
        replay = self.permuted + self.audit_share if self.permuted else 0.0
        share = {AUDIT: self.audit_share + replay + float(self.extra), ROWS: self.row_share}.get(
            tier, self.forward_share
        )
        return share * self.looks(tier)[0].rate / self.micro_batches

    def samples_lost(self, tier: str) -> float:
        """Share of a run's samples lost to redundant computation on other replicas: at most 1 / (M K)."""
        if tier != AUDIT or self.extra:
            return 0.0
        return (self.replicas - 1) / (self.replicas * self.micro_batches * self.interval)


@dataclass(frozen=True)
class DetectionLatency:
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

    plan: AuditPlan
    latencies: tuple[DetectionLatency, ...]
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


def expected_latency(plan: AuditPlan, tier: str, rate: float) -> float:
    """Expected steps until a tier detects a bad rank, by the formulas of the module; infinite if it never does.

    ``rate`` is the probability that a micro-batch of the bad rank is wrong, in (0, 1].
    """
    cadence, chance = plan.looks(tier)
    seen = chance * rate
    if cadence.micro_batches > 1:
        seen = 1.0 if seen == 1 else -math.expm1(cadence.micro_batches * math.log1p(-seen))
    return cadence.every * (1 / seen - 0.5) + 0.5 if seen else math.inf


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


def simulate_latency(plan: AuditPlan, tier: str, rate: float, trials: int, seed: int) -> NDArray[np.int64]:
    """Simulated steps, [trials], until a tier detects a bad rank whose micro-batches are wrong at this rate, in (0, 1].

    Only the rules are simulated: which micro-batches are wrong, which are checked, and whether their errors are
    visible. Needs at least two replicas and a visible share above 0.
    """
    draws = np.random.default_rng([seed, TIERS.index(tier), int(np.float64(rate).view(np.uint64))])
    return np.array([_one_trial(plan, tier, rate, draws) for _ in range(trials)], dtype=np.int64)


def _one_trial(plan: AuditPlan, tier: str, rate: float, draws: np.random.Generator) -> int:
    cadence, chance = plan.looks(tier)
    every = cadence.every
    until_look = int(draws.integers(every))  # steps from the first of the bad rank to the next that looks
    first_turn = int(draws.integers(1 << 20))  # number of that look in the run
    of = 1 if tier == SLICES else plan.micro_batches  # a rank has one update in a step
    size = min(math.ceil(2 * of * every / (cadence.micro_batches * chance)), _MOST)  # about as many until one is seen
    last = -1
    while True:
        wrong = last + np.cumsum(draws.geometric(rate, size=size))  # indices of the wrong micro-batches, or steps
        step, micro_batch = np.divmod(wrong, of)
        turn, after = np.divmod(step - until_look, every)
        seen = (after == 0) & _sees(plan, tier, turn + first_turn, micro_batch, draws)
        if seen.any():
            return int(step[np.argmax(seen)]) + 1
        last = wrong[-1]


def _sees(
    plan: AuditPlan, tier: str, turn: NDArray[np.int64], micro_batch: NDArray[np.int64], draws: np.random.Generator
) -> NDArray[np.bool_]:
    """Whether looks see what is wrong in micro-batches, by the rules of the checks; each look by its number."""
    if tier == AUDIT:
        return np.asarray(micro_batch == 0)
    if tier == SLICES:
        return draws.integers(plan.slices, size=len(turn)) == turn % plan.slices
    if tier == ROWS:
        product = turn // plan.micro_batches % plan.products
        at = micro_batch == turn % plan.micro_batches
        return np.asarray(at & (draws.integers(plan.products, size=len(turn)) == product))
    looked = plan.looks(tier)[0].micro_batches
    at = (micro_batch - turn * looked) % plan.micro_batches < looked
    return np.asarray(at & (draws.random(len(turn)) < plan.visible))


def plan_audits(
    plan: AuditPlan, rates: Sequence[float], trials: int, seed: int, on_progress: Callable[[str, int, int], None]
) -> PlanResult:
    """Latency of every tier at every rate.

    Args:
        rates: probabilities that a micro-batch of the bad rank is wrong, in (0, 1].
        trials: of each simulation; 0: formulas only.
        on_progress: called with the name of the work, how much is done, and the total.
    """
    latencies: list[DetectionLatency] = []
    for tier in TIERS:
        for rate in rates:
            latency = DetectionLatency(tier, rate, expected_latency(plan, tier, rate))
            if trials and math.isfinite(latency.expected):
                steps = simulate_latency(plan, tier, rate, trials, seed)
                error = float(steps.std(ddof=1) / math.sqrt(trials)) if trials > 1 else None
                latency = replace(latency, simulated=float(steps.mean()), error=error)
            latencies.append(latency)
            on_progress("rates and tiers", len(latencies), len(TIERS) * len(rates))
    return PlanResult(plan, tuple(latencies), trials)


@dataclass(frozen=True)
class CheckShares:
    """Time of checks over that of a micro-batch, but for ``fixed`` and ``slice``, which are over that of a step.

    Args:
        audit: checksums of all results of a micro-batch.
        forward: of its forward and recomputed results.
        row: the sums of one product.
        fixed: of parameters, in every step.
        slice: the checks of a slice of the optimizer.
    """

    audit: float
    forward: float
    row: float
    fixed: float
    slice: float


def check_shares(
    work: RankWork, audit: str, always_on: str, *, bytes_per_s: float, flop_per_s: float, call_s: float
) -> CheckShares:
    """Shares by the cost model.

    Args:
        audit: granularity of audits, a key of ``GRANULARITIES``.
        always_on: granularity of the check of every step.
        bytes_per_s: at which a check reads.
        flop_per_s: that a step reaches.
        call_s: seconds that each operation of a check costs whatever its size.
    """
    step_s = work.flops / flop_per_s
    of_audit, of_look = reads_of_step(work, audit), reads_of_step(work, always_on)

    def share(reads: Reads) -> float:
        return (reads.bytes / bytes_per_s + reads.count * call_s) / step_s

    return CheckShares(
        audit=share(sum((of_audit[phase] for phase in MICRO_BATCH_PHASES), Reads(0, 0))),
        forward=share(sum((of_look[phase] for phase in (FORWARD, RECOMPUTE)), Reads(0, 0))),
        row=share(reads_of_row_sums(work) * work.accumulation),
        fixed=share(of_audit[PARAMETER]),
        slice=share(Reads(SLICE_CALLS, SLICE_CALLS * SLICE_ELEMENTS * FP32_BYTES)),
    )
