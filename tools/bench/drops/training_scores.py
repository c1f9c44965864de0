"""Final losses of runs with dropped micro-batches, scored against those that dropped none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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
