"""Runs of the campaign on dropped micro-batches, and which micro-batches are late in them.

Delays are drawn as ``megasdc dropcompute simulate`` draws them, for a job of many replicas in the paper's environment;
the replicas that train start what the first of these would have started, by `replay_decisions`, and the time of a step
is the simulated one of the whole job. So late micro-batches come as they would, without any waiting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.config import DataSection
from megasdc.config.sections.drop_compute import DEFER, DISCARD, EXTRA_STEPS, LARGER_BATCH, RESAMPLE
from megasdc.distributions import Environment
from megasdc.distributions.kinds import BoundedLogNormal
from megasdc.dropcompute.compensation import expected_steps, larger_batch
from megasdc.dropcompute.pipeline import micro_batch_times
from tools.bench.drops.setup import SmallGpt, check_options, drop_config

REPLICAS = 2
GPT = SmallGpt(hidden=64, layers=2, sequence=64, vocab=1024)
LATENCY_S, MEAN_DELAY_S, COMMUNICATION_S = 0.45, 0.225, 0.5
"""Of a micro-batch, of its bounded log-normal delay, and of a step besides; the paper's environment."""
COMPENSATED_RATE = 0.1
PATTERN = "[bcg]*.py"
"""Modules of the standard library that are trained on: few, so that samples given up can come again in a short run."""


@dataclass(frozen=True)
class Setting:
    """What is left out in a run, and what becomes of it.

    Args:
        rate: share of micro-batches.
        samples: ``discard`` or ``defer``.
        compensation: as in the section; None: none.
    """

    rate: float
    samples: str = DISCARD
    compensation: str | None = None

    @property
    def fate(self) -> str:
        """What becomes of samples that are left out, as tables show it."""
        if not self.rate:
            return "-"
        return (self.compensation or ("given up" if self.samples == DISCARD else self.samples)).replace("_", " ")

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{100 * self.rate:g} %" + (f", {self.fate}" if self.rate else "")


COMPENSATIONS = tuple(Setting(COMPENSATED_RATE, DISCARD, one) for one in (EXTRA_STEPS, LARGER_BATCH, RESAMPLE))


@dataclass(frozen=True)
class DropTrainOptions:
    """Size of the campaign.

    Args:
        steps: of each run, as planned.
        seeds: runs of each setting; a seed decides on initial weights and on delays.
        rates: shares that are left out without compensation; 0 is always among them.
        replicas: of the simulated job.
        learning_rate: largest one of the schedule.
        evaluations: of a run, at equal distances.
        eval_samples: validation samples.
        gpt: the model.
    """

    steps: int = 240
    seeds: int = 3
    rates: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2)
    replicas: int = 64
    learning_rate: float = 2e-3
    evaluations: int = 6
    eval_samples: int = 256
    gpt: SmallGpt = GPT

    def __post_init__(self) -> None:
        problems = self.gpt.problems()
        if not all(0 < rate < 0.5 for rate in self.rates):
            problems.append("--rates: each must be above 0 and below 0.5")
        if len(set(self.rates)) < len(self.rates):
            problems.append("--rates: one of them is there twice")
        if self.replicas < REPLICAS:
            problems.append(f"--replicas: {self.replicas} must be at least {REPLICAS}, which train")
        if self.steps % max(1, self.evaluations):
            problems.append(f"--evaluations: {self.evaluations} must divide --steps, {self.steps}")
        check_options(self, problems)

    @property
    def settings(self) -> list[Setting]:
        """All of them, that without any loss first."""
        rates = [Setting(rate) for rate in (0.0, *self.rates)]
        return [*rates, *COMPENSATIONS, Setting(COMPENSATED_RATE, DEFER)]

    @property
    def runs(self) -> list[tuple[Setting, int]]:
        """Setting and seed of each run; all settings of a seed before the next."""
        return [(setting, seed) for seed in range(1, self.seeds + 1) for setting in self.settings]


@dataclass(frozen=True)
class Drawn:
    """What a run starts, and how long its steps last in the simulated job.

    Args:
        planned: micro-batches of a replica's step.
        completed: of the replicas that train, [step, replica].
        step_s: of the whole job, [step].
    """

    planned: int
    completed: NDArray[np.int64]
    step_s: NDArray[np.float64]

    def write(self, path: Path, micro_batches: int) -> None:
        """Write it as the log of a run.

        Args:
            path: the file.
            micro_batches: of a replica's step, as configured.
        """
        lines: list[dict[str, Any]] = [{"start": {"step": 0, "data": REPLICAS, "micro_batches": micro_batches}}]
        for step, counts in enumerate(self.completed.tolist(), 1):
            lines.append({"step": step, "planned": self.planned, "completed": counts})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def draw(options: DropTrainOptions, setting: Setting, seed: int) -> Drawn:
    """Simulate the job of a run.

    The threshold is the one that leaves out the setting's share of all its micro-batches.

    Args:
        options: sizes.
        setting: of the run.
        seed: of delays.
    """
    planned, steps = options.gpt.micro_batches, options.steps
    if setting.compensation == LARGER_BATCH:
        planned = larger_batch(planned, setting.rate)
    if setting.compensation == EXTRA_STEPS:
        steps += 2 * (expected_steps(steps, setting.rate) - steps)  # the replicas that train may be the later ones
    environment = Environment(LATENCY_S, (BoundedLogNormal(MEAN_DELAY_S),), seed)
    times = [
        micro_batch_times(environment.draw(step, 0, options.replicas, planned, 1), 0.0, True)
        for step in range(1, steps + 1)
    ]
    starts, ends = (np.stack(one) for one in zip(*times, strict=True))
    tau_s = np.inf
    if setting.rate:
        tau_s = np.quantile(starts[:, :, 1:], 1 - setting.rate * planned / (planned - 1))
    completed = 1 + (starts[:, :, 1:] <= tau_s).sum(axis=-1)
    done_s = np.take_along_axis(ends, completed[..., None] - 1, axis=-1)[..., 0]
    return Drawn(planned, completed[:, :REPLICAS], done_s.max(axis=1) + COMMUNICATION_S)


def run_config(
    options: DropTrainOptions, data: str, folder: Path, setting: Setting, seed: int, decisions: Path
) -> dict[str, Any]:
    """The configuration of one run.

    Args:
        options: sizes.
        data: folder of prepared data.
        folder: where the run writes.
        setting: what becomes of what is left out.
        seed: of weights.
        decisions: what it starts.
    """
    drop = {
        "replay_decisions": str(decisions),
        "samples": setting.samples,
        "compensation": setting.compensation,
        "record_times": False,
    }
    training = {
        "seed": seed,
        "eval_interval": options.steps // options.evaluations,
        "eval_samples": options.eval_samples,
    }
    return drop_config(
        options.gpt,
        folder,
        options.steps,
        drop,
        training=training,
        learning_rate=options.learning_rate,
        data=data,
    )


def prepared_section(options: DropTrainOptions, folder: Path) -> DataSection:
    """Data section of some of the standard library's modules, to be prepared in a folder."""
    return DataSection.model_validate(
        {
            "path": str(folder),
            "split": [8, 1, 1],
            "sources": [{"kind": "stdlib", "pattern": PATTERN}],
            "tokenizer": {"vocab_size": options.gpt.vocab, "train_characters": 1_000_000},
        }
    )
