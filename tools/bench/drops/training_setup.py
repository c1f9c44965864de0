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

from megasdc.config.drop_compute import EXTRA_STEPS, LARGER_BATCH
from megasdc.distributions import BoundedLogNormal
from megasdc.dropcompute.threshold import micro_batch_times
from megasdc.dropcompute.tuning import WorkBalance, choose_larger_batch, expected_steps
from megasdc.lab.planning.environment import DelayEnvironment
from tools.bench.drops.options import REPLICAS, DropTrainOptions, Setting
from tools.bench.small.gpt import small_config

LATENCY_S, MEAN_DELAY_S, COMMUNICATION_S = 0.45, 0.225, 0.5
"""Seconds of a micro-batch, of its bounded log-normal delay, and of a step besides; the paper's environment."""

WINDOW_STEPS = 45
"""Steps from which a larger batch is chosen."""


@dataclass(frozen=True)
class Drawn:
    """Micro-batches that a run starts, and the duration of its steps in the simulated job.

    ``planned`` is for a replica's step; ``completed`` [step, replica] is of the replicas that train, ``step_s`` [step]
    of the whole job.
    """

    planned: int
    completed: NDArray[np.int64]
    step_s: NDArray[np.float64]

    def write(self, path: Path, micro_batches: int) -> None:
        """Write it as the log of a run whose replicas have so many micro-batches configured in a step."""
        lines: list[dict[str, Any]] = [{"start": {"step": 0, "data": REPLICAS, "micro_batches": micro_batches}}]
        for step, counts in enumerate(self.completed.tolist(), 1):
            lines.append({"step": step, "planned": self.planned, "completed": counts})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def draw(options: DropTrainOptions, setting: Setting, seed: int) -> Drawn:
    """Simulate the job of a run with delays of this seed.

    The threshold is the one that drops the setting's share of all its micro-batches. A larger batch and its thresholds
    are chosen as a run does, from steps after those of the run, with the share as the largest one if it allows any.
    """
    planned, steps = options.gpt.micro_batches, options.steps
    if setting.compensation == EXTRA_STEPS:
        steps += 2 * (expected_steps(steps, setting.rate) - steps)  # the replicas that train may be the later ones
    environment = DelayEnvironment(LATENCY_S, (BoundedLogNormal(MEAN_DELAY_S),), seed)

    def times(first: int, count: int, micro_batches: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Starts and ends of steps, [replica, step, micro-batch]."""
        drawn = [
            micro_batch_times(environment.draw(step, 0, options.replicas, micro_batches, 1), 0.0, True)
            for step in range(first, first + count)
        ]
        starts, ends = zip(*drawn, strict=True)
        return np.stack(starts, axis=1), np.stack(ends, axis=1)

    if setting.compensation == LARGER_BATCH:
        rate = max(setting.rate, 1 / (planned + 1))
        window = times(steps + 1, WINDOW_STEPS, planned)
        chosen = choose_larger_batch(*window, 1, rate, 1, np.zeros(options.replicas))
        balance = WorkBalance(planned, options.replicas, chosen.aims)
        planned = chosen.micro_batches
    starts, ends = times(1, steps, planned)
    completed = np.full((options.replicas, steps), planned)
    if setting.compensation == LARGER_BATCH and balance.aims:
        for step in range(steps):
            completed[:, step] = _started(starts[:, step], balance.tau_s)
            balance.count(completed[:, step].tolist())
    elif setting.rate:
        tau_s = np.quantile(starts[:, :, 1:], 1 - setting.rate * planned / (planned - 1))
        completed = _started(starts, float(tau_s))
    done_s = np.take_along_axis(ends, completed[..., None] - 1, axis=-1)[..., 0]
    return Drawn(planned, completed[:REPLICAS].T, done_s.max(axis=0) + COMMUNICATION_S)


def _started(starts_s: NDArray[np.float64], tau_s: float) -> NDArray[np.int64]:
    """Micro-batches started before the threshold, and the first one in any case; without the last axis."""
    return 1 + (starts_s[..., 1:] < tau_s).sum(axis=-1)


def run_config(
    options: DropTrainOptions, data: Path, folder: Path, setting: Setting, seed: int, decisions: Path
) -> dict[str, Any]:
    """The configuration of one run, which repeats the logged decisions; the seed is of weights."""
    drop = {
        "enabled": True,
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
    return small_config(
        options.gpt,
        folder,
        options.steps,
        {"drop_compute": drop},
        training=training,
        learning_rate=options.learning_rate,
        data=data,
    )
