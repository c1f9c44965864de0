"""Options of the benchmarks of DropCompute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.config.drop_compute import (
    BACKWARD_PASS,
    DEFER,
    DISCARD,
    EXTRA_STEPS,
    LARGER_BATCH,
    MICRO_BATCH,
    PREDICTIVE,
    RESAMPLE,
)
from tools.bench.options import Options, numbers, option, parse_layouts, parse_numbers, parsed
from tools.bench.small.gpt import SmallGpt, small_config

REPLICAS = 2
"""Replicas that train in the campaign on dropped micro-batches."""
COMPENSATED_RATE = 0.1
LARGER_BATCH_RATE = 0.25
"""Largest drop rate of the run with a larger batch whose speed-up is measured."""
NEVER, AUTO = "inf", "auto"
LEAST_MICRO_BATCHES = 2


@dataclass(frozen=True)
class CostGpt(SmallGpt):
    """The model of the measurement of the cost."""

    hidden: int = option(128, "Width h; a multiple of 64.")
    layers: int = 2
    sequence: int = 64
    vocab: int = 512
    micro_batches: int = option(4, "Of a replica's step.")


@dataclass(frozen=True)
class DropCostOptions(Options):
    """Measure what DropCompute costs while nothing is dropped; exit code 1 if it is more than 0.2 % of a step.

    Cost is time inside its own calls over the time of a step; waiting for another stage or tensor rank to decide is not
    in it. The bar is for micro-batches of 0.5 s and more. Run it on a machine that does nothing else.

    Args:
        layouts: (tensor, pipeline, data).
    """

    steps: int = option(20, "Steps that count, in each layout.", least=1)
    delay_s: float = option(0.5, "Seconds that each stage sleeps before a micro-batch.", "--delay", min=0.0)
    gpt: SmallGpt = CostGpt()
    layouts: tuple[tuple[int, int, int], ...] = parsed(
        "1x1x2,2x2x1", "Tensor x pipeline x data, separated by commas.", parse_layouts
    )

    def problems(self) -> list[str]:
        """See ``Options``."""
        return self.gpt.problems(LEAST_MICRO_BATCHES)


@dataclass(frozen=True)
class Segment:
    """Steps of a run: those after ``start``, up to and with ``stop``."""

    start: int
    stop: int

    @property
    def steps(self) -> range:
        """Their numbers."""
        return range(self.start + 1, self.stop + 1)


@dataclass(frozen=True)
class DropSpeedupOptions(Options):
    """Measure how much faster DropCompute makes replicas that sleep, against the prediction; exit code 1 beyond 5 %.

    Runs without a threshold, with thresholds, and one that chooses its own take steps in turn; other steps predict. The
    fewer --steps, the more often the bar is missed by chance. Run it on a machine that does nothing else.

    Args:
        steps: as many predict; they have delays of the next seed, or in a run that chooses are its first.
        drop_rates: shares that the thresholds are to drop; a threshold that a run chooses itself is added.
        sigmas: of the rule "predictive"; None: that of the paper, which starts micro-batches before tau.
        warmup: steps before them in each run, at least 1.
    """

    steps: int = option(28, "Steps that are measured for each threshold.", least=1)
    replicas: int = option(8, "Ranks on this machine, all data parallel.", least=1)
    gpt: SmallGpt = field(default=SmallGpt())
    constant_s: float = option(0.06, "Seconds that every micro-batch sleeps.", "--constant", min=0.0)
    mean_s: float = option(0.1, "Mean of its additional sleep in seconds, bounded log-normal.", "--mean")
    drop_rates: tuple[float, ...] = numbers(
        (0.025, 0.05, 0.1),
        "Drop rates for which thresholds are chosen, separated by commas.",
        "--drop-rates",
        "0.05,0.1",
    )
    sigmas: float | None = option(None, 'Use rule "predictive" with so many standard deviations.', min=0.0)
    seed: int = option(1, "Seed of the delays.", min=0)
    warmup: int = 2

    def problems(self) -> list[str]:
        """See ``Options``."""
        found = self.gpt.problems(LEAST_MICRO_BATCHES)
        if self.sigmas is not None and not 0 <= self.sigmas < math.inf:
            found.append(f"--sigmas: {self.sigmas} must be at least 0")
        if self.warmup < 1:
            found.append(f"--warmup: {self.warmup} must be at least 1, since a first step is slower")
        if not self.mean_s > 0:
            found.append(f"--mean: {self.mean_s} must be above 0, since equal replicas gain nothing")
        if not all(0 < rate < 1 for rate in self.drop_rates):
            found.append("--drop-rates: each must be above 0 and below 1")
        return found

    @property
    def first(self) -> Segment:
        """The first steps after warming up."""
        return Segment(self.warmup, self.warmup + self.steps)

    @property
    def second(self) -> Segment:
        """As many steps after those."""
        return Segment(self.first.stop, self.first.stop + self.steps)

    def delay(self, seed: int) -> list[dict[str, Any]]:
        """Entries of `delay`."""
        constant = {"kind": "normal", "mean_s": self.constant_s, "std_s": 0.0, "seed": seed}
        return [constant, {"kind": "bounded_lognormal", "mean_s": self.mean_s, "seed": seed}]

    @property
    def num_steps(self) -> int:
        """Of all runs."""
        return 3 * self.second.stop + (1 + len(self.drop_rates)) * self.first.stop

    def config(
        self,
        folder: Path,
        threshold: float | str,
        steps: int | None = None,
        seed: int | None = None,
        larger_batch: bool = False,
    ) -> dict[str, Any]:
        """The configuration of a run that writes to this folder, with a threshold as in the section.

        Without ``steps`` it lasts until what is measured of it has ended; without ``seed`` its delays are those of the
        runs that are compared.
        """
        if steps is None:
            steps = self.second.stop if isinstance(threshold, str) else self.first.stop
        drop: dict[str, Any] = {
            "threshold": threshold,
            "warmup_steps": self.warmup,
            "window_steps": self.steps,
            "max_drop_rate": 1.0,
        }
        if larger_batch:
            drop |= {"max_drop_rate": LARGER_BATCH_RATE, "samples": DISCARD, "compensation": LARGER_BATCH}
        if threshold == NEVER:
            drop = {"threshold": threshold}
        elif self.sigmas is not None:
            drop |= {"rule": PREDICTIVE, "sigmas": self.sigmas}
        sections = {"drop_compute": {"enabled": True, **drop}, "delay": self.delay(self.seed if seed is None else seed)}
        return small_config(self.gpt, folder, steps, sections)


@dataclass(frozen=True)
class Setting:
    """Share of micro-batches dropped in a run, and what becomes of their samples: ``discard`` or ``defer``.

    Compensation is as in the section; None: none. ``chosen``: the threshold is searched for, as a run with threshold
    "auto" does, and the share is the largest that it may drop.
    """

    rate: float
    samples: str = DISCARD
    compensation: str | None = None
    chosen: bool = False

    @property
    def fate(self) -> str:
        """The fate of dropped samples, as tables show it."""
        if not self.rate:
            return "-"
        return (self.compensation or ("given up" if self.samples == DISCARD else self.samples)).replace("_", " ")

    @property
    def name(self) -> str:
        """As tables show it."""
        share = f"{'at most ' if self.chosen else ''}{100 * self.rate:g} %"
        return share + (f", {self.fate}" if self.rate else "")


COMPENSATIONS = tuple(Setting(COMPENSATED_RATE, DISCARD, one) for one in (EXTRA_STEPS, LARGER_BATCH, RESAMPLE))


@dataclass(frozen=True)
class LossGpt(SmallGpt):
    """The model of the campaign."""

    hidden: int = option(64, "Width h; a multiple of 32.")
    layers: int = option(2, "Transformer layers.")
    sequence: int = option(64, "Tokens of a sample.")
    vocab: int = 1024


@dataclass(frozen=True)
class DropTrainOptions(Options):
    """Train a small GPT with dropped micro-batches, at several drop rates and with each compensation at 10 %.

    Which ones are late is simulated for many replicas and repeated by two that train. Prints final losses as Table 1
    of Giladi et al. 2023 does, and loss against steps and simulated time. It only measures; there is no bar.
    With --all-train every replica trains, thresholds are chosen as in a run, and steps and time to equal loss are
    printed, as in Figure 5 there.

    Args:
        rates: shares that are dropped without compensation; 0 is always among them.
        learning_rate: largest one of the schedule.
        evaluations: of a run, at equal distances.
        all_train: whether all replicas train, in one rank: row r of micro-batch m is that of replica r, and what it
            drops is masked out of the loss. Thresholds are then the chosen ones that drop at most these shares.
    """

    steps: int = option(240, "Optimizer steps of a run.", least=1)
    seeds: int = option(3, "Runs of each setting; a seed is of weights and delays.", least=1)
    rates: tuple[float, ...] = numbers(
        (0.025, 0.05, 0.1, 0.2),
        "Drop rates, separated by commas; 0 is always included.",
        "--rates",
        "0.05,0.1",
    )
    replicas: int = option(64, "Replicas of the simulated job.", least=1)
    gpt: SmallGpt = LossGpt()
    learning_rate: float = option(2e-3, "Peak of the schedule.")
    evaluations: int = option(6, "Evaluations of a run; a divisor of --steps.", least=1)
    eval_samples: int = option(256, "Validation samples.", least=1)
    all_train: bool = option(False, "Train all replicas, as rows of one batch, with thresholds chosen within --rates.")

    def problems(self) -> list[str]:
        """See ``Options``."""
        found = self.gpt.problems(LEAST_MICRO_BATCHES)
        if not all(0 < rate < 0.5 for rate in self.rates):
            found.append("--rates: each must be above 0 and below 0.5")
        if len(set(self.rates)) < len(self.rates):
            found.append("--rates: one of them is there twice")
        if self.replicas < REPLICAS:
            found.append(f"--replicas: {self.replicas} must be at least {REPLICAS}, which train")
        if self.steps % max(1, self.evaluations):
            found.append(f"--evaluations: {self.evaluations} must divide --steps, {self.steps}")
        return found

    @property
    def settings(self) -> list[Setting]:
        """All of them, that without any loss first."""
        rates = [Setting(rate, chosen=self.all_train and rate > 0) for rate in (0.0, *self.rates)]
        if self.all_train:
            return rates
        return [*rates, *COMPENSATIONS, Setting(COMPENSATED_RATE, DEFER)]

    @property
    def trained(self) -> int:
        """Number of replicas that train."""
        return self.replicas if self.all_train else REPLICAS

    @property
    def runs(self) -> list[tuple[Setting, int]]:
        """Setting and seed of each run; all settings of a seed before the next."""
        return [(setting, seed) for seed in range(1, self.seeds + 1) for setting in self.settings]


@dataclass(frozen=True)
class LocalGpt(SmallGpt):
    """The model of the comparison with Local-SGD."""

    hidden: int = option(64, "Width h; a multiple of 32.")
    layers: int = 1
    sequence: int = 32
    vocab: int = 512
    micro_batches: int = option(4, "Of a replica's step.")


@dataclass(frozen=True)
class LocalSgdOptions(Options):
    """Train synchronously and by Local-SGD, each with and without DropCompute; exit code 1 if a speed is not predicted.

    Real launches, with a straggler and a tail of late micro-batches. Bar: measured within 5 % of what the times of the
    synchronous run predict. Run it on a machine that does nothing else.
    """

    replicas: int = option(4, "Replicas, a rank each.", least=2)
    every: int = option(8, "Local steps of a round.", least=1)
    rounds: int = option(18, "Rounds.", least=8)
    latency_s: float = option(0.06, "Seconds that each micro-batch sleeps.", "--latency", min=0.001)
    straggler: float = option(0.25, "Part of a micro-batch by which one replica is slower.", min=0.0)
    learning_rate: float = option(2e-3, "Largest learning rate.", min=0.0)
    gpt: SmallGpt = LocalGpt()


@dataclass(frozen=True)
class LocalFaultOptions(Options):
    """Try faults in one replica of Local-SGD between exchanges; exit code 1 if one is missed, or a clean round is not.

    The others' weights must be those of a run without the fault, and nobody may be left out of a clean round.
    """

    values: int = option(30, "Faults in values: NaN and spikes by turns.", least=1)
    times: int = option(15, "Runs in which one replica is killed and another late.", least=0)
    clean: int = option(300, "Rounds without a fault.", least=1)
    rounds: int = option(60, "Rounds of a run with a lost and a late replica.", least=8)
    factor: float = option(1000.0, "By which a spike multiplies 200 master weights.", min=1.0)
    step_s: float = option(0.1, "Seconds of a step in runs with a lost replica, in which it is started again.", min=0.0)
    deadline_s: float = option(3.0, "Seconds for which a round with a late replica waits.", "--deadline", min=0.1)
    gpt: SmallGpt = LocalGpt(micro_batches=1)


@dataclass(frozen=True)
class PartialGpt(LossGpt):
    """The model of the campaign on partial backward passes."""

    layers: int = option(4, "Transformer layers.")
    micro_batches: int = 12


NONE, GRADIENTS = "none", "gradients"
PARTIAL_KINDS = (NONE, MICRO_BATCH, BACKWARD_PASS)
"""What runs drop in the campaign on partial backward passes."""


def _parse_counts(text: str) -> tuple[int, ...]:
    return tuple(round(one) for one in parse_numbers("--micro-batches", text, "1,2,4,12"))


@dataclass(frozen=True)
class DropPartialOptions(Options):
    """Train a small GPT with backward passes that end at the threshold, against whole micro-batches, at several M.

    Which replicas are late, and how far they have come, is simulated for many and repeated by two that train; both
    granularities have one threshold. Prints what is lost, the time of a step, the final loss, and for each layer the
    mean gradient, at the first weights, against that of steps with nothing dropped. It only measures; there is no bar.

    Args:
        learning_rate: largest one of the schedule.
        counts: micro-batches M of a replica's step.
    """

    steps: int = option(240, "Optimizer steps of a run.", least=1)
    seeds: int = option(3, "Runs of each setting; a seed is of weights and delays.", least=1)
    counts: tuple[int, ...] = option(
        (1, 2, 4, 12),
        "Micro-batches of a replica's step, separated by commas.",
        "--micro-batches",
        given="1,2,4,12",
        callback=_parse_counts,
    )
    late: float = option(0.25, "Share of the replicas' steps that are not done at the threshold.", min=0.0, max=1.0)
    gradient_steps: int = option(60, "Steps over which gradients are averaged.", least=1)
    replicas: int = option(64, "Replicas of the simulated job.", least=REPLICAS)
    gpt: SmallGpt = PartialGpt()
    learning_rate: float = option(2e-3, "Peak of the schedule.")
    eval_samples: int = option(256, "Validation samples.", least=1)

    def problems(self) -> list[str]:
        """See ``Options``."""
        found = self.gpt.problems()
        if not self.counts or min(self.counts) < 1 or len(set(self.counts)) < len(self.counts):
            found.append("--micro-batches: needed different whole numbers, each at least 1")
        if not 0 < self.late < 1:
            found.append("--late: must be above 0 and below 1")
        return found

    @property
    def cases(self) -> list[tuple[int, int, str]]:
        """Micro-batches, seed and what is dropped of each run; after the first seed's the gradients of each M."""
        found = [
            (count, seed, kind) for seed in range(1, self.seeds + 1) for count in self.counts for kind in PARTIAL_KINDS
        ]
        gradients = [(count, 1, GRADIENTS) for count in self.counts]
        first = len(PARTIAL_KINDS) * len(self.counts)
        return [*found[:first], *gradients, *found[first:]]
