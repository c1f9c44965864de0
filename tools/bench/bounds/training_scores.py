"""Final losses of runs with faults and bounds, scored against their healthy partners.

Metrics as in Pei, Lausen, Karypis, IEEE Micro 2025, 10.1109/MM.2025.3642709; there a healthy node is compared with
unhealthy nodes, here the runs of a seed with and without injected faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tools.bench.bounds.options import Setting

EPSILON = 0.005
"""Relative increase of the final loss above which a faulty run counts as worse."""


@dataclass(frozen=True)
class BoundRun:
    """One run, with faults on one replica or healthy.

    The validation loss is in nats, NaN where the run had none; ``share`` is that of the elements bounded in all steps,
    None without a bound or where the run ended early; ``faults`` counts injections into a parameter's gradient.
    """

    setting: Setting
    seed: int
    faulty: bool
    loss: float
    steps: int
    skipped: int
    share: float | None
    faults: int
    seconds: float


@dataclass(frozen=True)
class SettingScore:
    """All runs of one setting.

    Attributes:
        healthy: losses of the healthy runs that did not fail.
        faulty: those of the faulty runs that did not fail.
        price: mean relative increase of ``healthy`` over the healthy runs of the same seeds without a bound; None
            without.
        worst: of the faulty runs that did not fail, the loss of the one with the largest increase; None: all failed.
        increase: its relative increase over the healthy run of the same seed and setting.
        over_unbounded: the largest increase over the healthy run of the same seed without a bound: effect and price.
        worse: faulty runs, not failed, with an increase above ``EPSILON``.
        diverged: faulty runs whose loss is finite and above the entropy of token frequencies.
        not_finite: faulty runs whose loss is NaN or infinite, or that were ended because they only skipped steps.
        failed_healthy: healthy runs that diverged or are not finite.
        skipped: steps skipped in the faulty runs.
        share: mean share of elements bounded in the faulty runs; None without a bound.
    """

    also = ("name",)

    setting: Setting
    healthy: tuple[float, ...]
    faulty: tuple[float, ...]
    price: float | None
    worst: float | None
    increase: float | None
    over_unbounded: float | None
    worse: int
    diverged: int
    not_finite: int
    failed_healthy: int
    skipped: int
    skipped_healthy: int
    share: float | None
    share_healthy: float | None

    @property
    def name(self) -> str:
        """Of the setting."""
        return self.setting.name


def score(runs: Sequence[BoundRun], entropy: float) -> list[SettingScore]:
    """Score every setting, in the order in which it came first; runs must include the healthy ones without a bound.

    ``entropy`` is that of token frequencies, in nats; a final loss above it counts as diverged.
    """
    base = _losses([run for run in runs if run.setting.theta is None and not run.faulty], entropy)
    settings = dict.fromkeys(run.setting for run in runs)
    return [_score_one(setting, [run for run in runs if run.setting == setting], base, entropy) for setting in settings]


def _losses(runs: Sequence[BoundRun], entropy: float) -> dict[int, float]:
    """By seed, the losses of the runs that did not fail."""
    return {run.seed: run.loss for run in runs if math.isfinite(run.loss) and run.loss <= entropy}


def _score_one(setting: Setting, runs: Sequence[BoundRun], base: dict[int, float], entropy: float) -> SettingScore:
    with_faults, without = [run for run in runs if run.faulty], [run for run in runs if not run.faulty]
    healthy, faulty = _losses(without, entropy), _losses(with_faults, entropy)
    increases = {seed: loss / healthy[seed] - 1 for seed, loss in faulty.items() if seed in healthy}
    prices = [loss / base[seed] - 1 for seed, loss in healthy.items() if seed in base]
    totals = [loss / base[seed] - 1 for seed, loss in faulty.items() if seed in base]
    worst = max(increases, key=increases.__getitem__, default=None)
    not_finite = sum(not math.isfinite(run.loss) for run in with_faults)
    return SettingScore(
        setting=setting,
        healthy=tuple(healthy.values()),
        faulty=tuple(faulty.values()),
        price=fmean(prices) if prices and setting.theta is not None else None,
        worst=None if worst is None else faulty[worst],
        increase=None if worst is None else increases[worst],
        over_unbounded=max(totals, default=None),
        worse=sum(one > EPSILON for one in increases.values()),
        diverged=len(with_faults) - len(faulty) - not_finite,
        not_finite=not_finite,
        failed_healthy=len(without) - len(healthy),
        skipped=sum(run.skipped for run in with_faults),
        skipped_healthy=sum(run.skipped for run in without),
        share=_mean_share(with_faults),
        share_healthy=_mean_share(without),
    )


def _mean_share(runs: Sequence[BoundRun]) -> float | None:
    shares = [run.share for run in runs if run.share is not None]
    return fmean(shares) if shares else None
