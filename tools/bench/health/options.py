"""Options of the benchmarks of health."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.bench.campaign import CampaignOptions
from tools.bench.health.hang_kinds import KINDS
from tools.bench.options import Options, numbers, option, parse_layouts, parsed
from tools.bench.small.gpt import SmallGpt, small_config


@dataclass(frozen=True)
class HangOptions(CampaignOptions):
    """Make runs hang in many ways, and see who is named and how fast they end; exit code 1 if a bar is missed.

    The right rank in 99 % of the hangs, no other one ever, all ranks ended ten seconds after the limit of their phases,
    and no alarm in runs without a hang under other load.
    """

    known = KINDS

    drills: int = option(120, "Hangs, kinds and layouts in turn.", least=0)
    kinds: str = option(",".join(KINDS), "Kinds of hangs.")
    layouts: str = option("1x1x4,2x2x2,1x4x1", "Tensor x pipeline x data of each layout.")
    clean_steps: int = option(10_000, "Steps without a hang; rounded up to 500.", least=0)


@dataclass(frozen=True)
class WatchedGpt(SmallGpt):
    """The model of a run that is watched; its vocabulary is that of the prepared text."""

    hidden: int = option(256, "Width h; a multiple of 32.", least=32)
    layers: int = option(8, "Transformer layers.", least=1)
    sequence: int = option(256, "Tokens of a sample.", least=8)
    vocab: int = 512
    micro_batches: int = option(8, "Of a replica's step.", least=1)


@dataclass(frozen=True)
class HealthCostOptions(Options):
    """Measure what health costs; exit code 1 if it is more than 0.05 % of a step or 1 % of a core for the agent.

    Time inside all calls of its hooks over the time of a step, an agent's processor time after its start, losses with
    and without it bit for bit, and memory and files of an agent's parts over a simulated time.

    Args:
        layouts: (tensor, pipeline, data).
    """

    steps: int = option(100, "Steps that count, in each layout.", least=2)
    settle_s: float = option(5.0, "Seconds of an agent that do not count: its start.", "--settle", min=0.0)
    weeks: float = option(0.1, "Simulated weeks of an agent; 0: none. One takes half an hour.", min=0.0)
    gpt: SmallGpt = WatchedGpt()
    layouts: tuple[tuple[int, int, int], ...] = parsed(
        "1x1x2", "Tensor x pipeline x data, separated by commas.", parse_layouts
    )

    def problems(self) -> list[str]:
        """See ``Options``."""
        return self.gpt.problems()

    def config(self, layout: tuple[int, int, int], data: Path, folder: Path, watched: bool) -> dict[str, Any]:
        """The configuration of a run that writes to ``folder``, one step longer than the steps that count."""
        sections = {"health": {"enabled": watched}, "checkpoint": {"interval": 0}}
        return small_config(self.gpt, folder, self.steps + 1, sections, layout=layout[:2], data=data)


CLEAN = 1.0
DESIGN = 1.5
"""How much longer the last of several stages takes, in all replicas."""


@dataclass(frozen=True)
class Case:
    """A trial: the slow replica takes ``ratio`` times as long, 1: none is slow; noise is of each micro-batch."""

    noise: float
    ratio: float
    number: int


@dataclass(frozen=True)
class SleepingGpt(SmallGpt):
    """The model of replicas that sleep: as little computation as there can be."""

    micro_batches: int = option(4, "Of a replica's step.")


@dataclass(frozen=True)
class StragglerOptions(Options):
    """Measure who is named as a straggler among replicas that sleep; exit code 1 if one is missed or named wrongly.

    A replica that is 10 % slower must be named in 95 % of the runs, one that is 30 % slower in all, nobody else at any
    time; and 90 % of a micro-batch's time must be sleep. The whole table takes more than an hour.
    """

    trials: int = option(100, "Runs with a slow replica, for each noise and ratio.", least=1)
    clean: int = option(20, "Runs without one, for each noise.", least=0)
    steps: int = option(50, "Steps within which it must be named.", least=20)
    clean_steps: int = option(500, "Steps of a run without one.", least=20)
    replicas: int = option(4, "Replicas, each a rank on this machine for each stage.", least=2)
    stages: int = option(1, "Stages; the last of several takes half as long again in all replicas.", least=1)
    sleep_s: float = option(0.05, "Seconds that a micro-batch sleeps.", "--sleep", min=0.001)
    noises: tuple[float, ...] = numbers((0.02, 0.05, 0.1), "Standard deviation of its logarithm.", "--noises", "0.05")
    ratios: tuple[float, ...] = numbers((1.1, 1.3), "Of the slow replica to its peers.", "--ratios", "1.1,1.3")
    seed: int = option(1, "Seed of all noise.", least=0)
    gpt: SmallGpt = SleepingGpt()

    def problems(self) -> list[str]:
        """See ``Options``."""
        found = self.gpt.problems()
        if not all(ratio > CLEAN for ratio in self.ratios):
            found.append("--ratios: each must be above 1")
        if not all(noise >= 0 for noise in self.noises):
            found.append("--noises: each must be at least 0")
        return found

    def cases(self) -> Iterator[Case]:
        """All trials in their order."""
        for noise in self.noises:
            for ratio in self.ratios:
                yield from (Case(noise, ratio, number) for number in range(self.trials))
            yield from (Case(noise, CLEAN, number) for number in range(self.clean))

    def steps_of(self, case: Case) -> int:
        """Steps of a trial."""
        return self.clean_steps if case.ratio == CLEAN else self.steps

    def slow_replica(self, case: Case) -> int:
        """Which one is slow: each in turn."""
        return case.number % self.replicas

    def sleeps(self, case: Case) -> NDArray[np.float64]:
        """Seconds that micro-batches sleep, [replica, step, micro-batch, stage]."""
        seed = [self.seed, round(1e4 * case.noise), round(1e4 * case.ratio), case.number]
        shape = (self.replicas, self.steps_of(case), self.gpt.micro_batches, self.stages)
        drawn = self.sleep_s * np.exp(case.noise * np.random.default_rng(seed).standard_normal(shape))
        drawn[self.slow_replica(case)] *= case.ratio
        if self.stages > 1:
            drawn[..., -1] *= DESIGN
        return drawn

    def config(self, case: Case, folder: Path, sleeps: Path) -> dict[str, Any]:
        """The configuration of a trial that writes to ``folder``; ``sleeps``: the file of what it sleeps."""
        sections = {
            "delay": [{"kind": "trace", "path": str(sleeps)}],
            "health": {"enabled": True},
        }
        return small_config(self.gpt, folder, self.steps_of(case), sections, layout=(1, self.stages))
