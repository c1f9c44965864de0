"""Final losses of runs with dropped micro-batches, scored against those that dropped none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from tools.bench.drops.options import DropTrainOptions, Setting
from tools.bench.drops.training_setup import draw

EPSILON = 0.005
"""Relative change of the final loss up to which it counts as none, however equal seeds are."""


@dataclass(frozen=True)
class DropRun:
    """One run, with samples used by all replicas and those of an epoch.

    ``losses`` are [step, validation loss in nats], the last one at the end; ``skipped`` are steps that the optimizer
    did not take.
    """

    setting: Setting
    seed: int
    steps: int
    samples: int
    epoch_samples: int
    skipped: int
    losses: Sequence[Sequence[float]]
    seconds: float

    @property
    def loss(self) -> float:
        """At the end."""
        return self.losses[-1][1]


@dataclass(frozen=True)
class SettingScore:
    """All runs of one setting: final losses by seed, and means of steps, samples and simulated time.

    ``increases`` are of each loss over that of the run of the same seed that dropped nothing, as a share; samples and
    time are over those of a run that drops nothing; ``curve`` holds (step, seconds of the simulated job, mean loss).
    """

    also = ("name", "over_none")

    setting: Setting
    losses: tuple[float, ...]
    increases: tuple[float, ...]
    steps: float
    samples: float
    time: float
    curve: tuple[tuple[float, float, float], ...]

    @property
    def name(self) -> str:
        """Of the setting."""
        return self.setting.name

    @property
    def over_none(self) -> float:
        """Mean of the increases."""
        return fmean(self.increases)

    @property
    def is_chance(self) -> bool:
        """Whether seeds do not agree that it is an increase, or a decrease, or it is too small to matter."""
        return abs(self.over_none) <= EPSILON or min(self.increases) <= 0 <= max(self.increases)


def score(runs: Sequence[DropRun], options: DropTrainOptions) -> list[SettingScore]:
    """Score every setting; each needs runs with the same seeds."""
    base = {run.seed: run for run in runs if not run.setting.rate}
    seconds = {(run.setting, run.seed): draw(options, run.setting, run.seed).step_s.cumsum() for run in runs}
    found = []
    for setting in dict.fromkeys(run.setting for run in runs):
        own = [run for run in runs if run.setting == setting]
        times = [seconds[setting, run.seed] for run in own]
        none = [seconds[base[run.seed].setting, run.seed][-1] for run in own]
        found.append(
            SettingScore(
                setting=setting,
                losses=tuple(run.loss for run in own),
                increases=tuple(run.loss / base[run.seed].loss - 1 for run in own),
                steps=fmean(run.steps for run in own),
                samples=fmean(run.samples / base[run.seed].samples for run in own),
                time=fmean(float(time[run.steps - 1] / last) for run, time, last in zip(own, times, none, strict=True)),
                curve=tuple(
                    (
                        fmean(run.losses[point][0] for run in own),
                        fmean(float(time[int(run.losses[point][0]) - 1]) for run, time in zip(own, times, strict=True)),
                        fmean(run.losses[point][1] for run in own),
                    )
                    for point in range(min(len(run.losses) for run in own))
                ),
            )
        )
    return found


@dataclass(frozen=True)
class EqualLoss:
    """What runs of one setting need for the loss that those with nothing dropped have after ``step`` steps.

    ``losses``: these, by seed; ``steps`` and ``time``, simulated: over those of the run of the same seed with nothing
    dropped, by seed.
    """

    setting: Setting
    step: int
    losses: tuple[float, ...]
    steps: tuple[float, ...]
    time: tuple[float, ...]


def to_equal_loss(runs: Sequence[DropRun], options: DropTrainOptions) -> list[EqualLoss]:
    """Steps and time to equal loss, at the evaluations of the second half of the runs that drop nothing.

    Where a loss is reached is interpolated between evaluations, at the first that is not above it. Losses that a seed
    does not reach have no row.
    """
    base = {run.seed: run for run in runs if not run.setting.rate}
    seconds = {(run.setting, run.seed): [0.0, *draw(options, run.setting, run.seed).step_s.cumsum()] for run in runs}

    def reach(run: DropRun, loss: float) -> tuple[float, float]:
        """Steps and seconds until a run has a loss."""
        step, total = _step_of(run, loss), seconds[run.setting, run.seed]
        return step, float(np.interp(step, np.arange(len(total)), total))

    found = []
    for setting in dict.fromkeys(run.setting for run in runs if run.setting.rate):
        own = [run for run in runs if run.setting == setting]
        for point, (step, _) in enumerate(base[own[0].seed].losses):
            losses = tuple(base[run.seed].losses[point][1] for run in own)
            both = [(reach(base[run.seed], loss), reach(run, loss)) for run, loss in zip(own, losses, strict=True)]
            if 2 * step >= options.steps and not any(math.isnan(one[0]) for pair in both for one in pair):
                steps, time = (tuple(dropped[at] / none[at] for none, dropped in both) for at in (0, 1))
                found.append(EqualLoss(setting, int(step), losses, steps, time))
    return found


def _step_of(run: DropRun, loss: float) -> float:
    """Steps after which a run has a validation loss, interpolated; NaN: it has not, or before its first evaluation."""
    for (before, high), (after, low) in pairwise(run.losses):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return math.nan


def verdict(scores: Sequence[SettingScore]) -> str:
    """The effect of dropped micro-batches on the final loss, and whether it is more than chance, as text.

    The setting that drops nothing has to be the first.
    """
    others = scores[1:]
    plain = [one for one in others if one.setting.fate == "given up"]
    made_up = [one for one in others if one not in plain]
    said = []
    if plain:
        rates = " %, ".join(f"{100 * one.setting.rate:g}" for one in plain)
        said.append(
            f"leaving out {rates} % of micro-batches changes the final loss by "
            f"{_range(plain)} in {_times(plain)} of the time (simulated)"
        )
    if made_up:
        said.append(f"with ways to keep or make up for what is left out it changes by {_range(made_up)}")
    beyond = [one.setting.name for one in others if not one.is_chance]
    more = ", ".join(beyond) if beyond else "none"
    said.append(f"changes of one sign in all {len(scores[0].losses)} seeds and of over {_percent(EPSILON)}: {more}.")
    text = "; ".join(said)
    return text[0].upper() + text[1:]


def equal_loss_verdict(rows: Sequence[EqualLoss], scores: Sequence[SettingScore]) -> str:
    """Steps and time to equal loss of each setting, over its rows and seeds, as text."""
    said = []
    for one in scores[1:]:
        own = [row for row in rows if row.setting == one.setting]
        left_out = f"{one.setting.name} ({100 * (1 - one.samples):.1f} % are)"
        if not own:
            said.append(f"{left_out}: no loss of the second half was reached")
            continue
        steps, time = seed_changes([row.steps for row in own]), seed_changes([row.time for row in own])
        said.append(f"{left_out}: {steps} % steps and {time} % time to equal loss")
    return "Chosen thresholds that drop " + "; ".join(said) + "."


def seed_changes(ratios: Sequence[Sequence[float]]) -> str:
    """Mean change in percent, and its range over seeds; each seed's is its mean over rows, [row, seed]."""
    seeds = [100 * (fmean(one) - 1) for one in zip(*ratios, strict=True)]
    return f"{fmean(seeds):+.1f} ({min(seeds):+.1f} to {max(seeds):+.1f})"


def _range(scores: Sequence[SettingScore]) -> str:
    found = [one.over_none for one in scores]
    low, high = _percent(min(found), "+"), _percent(max(found), "+")
    return low if low == high else f"{low} to {high}"


def _times(scores: Sequence[SettingScore]) -> str:
    found = [one.time for one in scores]
    low, high = f"{100 * min(found):.0f}", f"{100 * max(found):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.2f} %"
