"""Runs of the campaign on dropped micro-batches, and which micro-batches are late in them.

Delays are drawn as ``megasdc dropcompute simulate`` draws them, for a job of many replicas in the paper's environment;
the replicas that train start what the first of these would have started, by `replay_decisions`, and the time of a step
is the simulated one of the whole job. So late micro-batches come as they would, without any waiting. Where all replicas
train, one rank has their micro-batches as rows of batches, and masks out what is dropped: the gradient is that of the
whole job, divided by the planned number of micro-batches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megasdc.config.drop_compute import EXTRA_STEPS, LARGER_BATCH
from megasdc.data.loader import MicroBatch, MicroBatchLoader
from megasdc.distributions import BoundedLogNormal
from megasdc.dropcompute.threshold import micro_batch_times, search_recorded
from megasdc.dropcompute.tuning import WorkBalance, choose_larger_batch, expected_steps
from megasdc.lab.planning.environment import DelayEnvironment
from tools.bench.drops.options import REPLICAS, DropTrainOptions, Setting
from tools.bench.small.gpt import small_config

LATENCY_S, MEAN_DELAY_S, COMMUNICATION_S = 0.45, 0.225, 0.5
"""Seconds of a micro-batch, of its bounded log-normal delay, and of a step besides; the paper's environment."""

WINDOW_STEPS = 45
"""Steps from which a larger batch or a threshold is chosen."""


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

    The threshold is the one that drops the setting's share of all its micro-batches. Where it is chosen, and a larger
    batch with its thresholds, that is done as in a run, from steps after those of the run, with the share as the
    largest one if it allows any.
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
    elif setting.chosen:
        found = search_recorded(*times(steps + 1, WINDOW_STEPS, planned), COMMUNICATION_S, setting.rate)
        completed = _started(starts, found.tau_s)
    elif setting.rate:
        tau_s = np.quantile(starts[:, :, 1:], 1 - setting.rate * planned / (planned - 1))
        completed = _started(starts, float(tau_s))
    done_s = np.take_along_axis(ends, completed[..., None] - 1, axis=-1)[..., 0]
    return Drawn(planned, completed[: options.trained].T, done_s.max(axis=0) + COMMUNICATION_S)


def _started(starts_s: NDArray[np.float64], tau_s: float) -> NDArray[np.int64]:
    """Micro-batches started before the threshold, and the first one in any case; without the last axis."""
    return 1 + (starts_s[..., 1:] < tau_s).sum(axis=-1)


class ReplicaRows:
    """Micro-batches of all replicas as rows of batches; rows that a replica drops are masked out of the loss.

    So the k-th sample of replica r in a step is the one that it would take in a run of so many ranks that discards
    what it drops.

    Args:
        completed: micro-batches that each replica completes, [step, replica].
        micro_batches: planned of each in a step.
    """

    def __init__(self, loader: MicroBatchLoader, completed: NDArray[np.int64], micro_batches: int) -> None:
        self._loader, self._completed, self._micro_batches = loader, completed, micro_batches
        self._read = 0

    def __iter__(self) -> ReplicaRows:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch of all replicas."""
        tokens, (labels, loss_mask) = next(self._loader)
        step, micro_batch = divmod(self._read, self._micro_batches)
        self._read += 1
        loss_mask[torch.from_numpy(self._completed[step] <= micro_batch)] = 0.0
        return tokens, (labels, loss_mask)


def run_config(
    options: DropTrainOptions, data: Path, folder: Path, setting: Setting, seed: int, decisions: Path | None
) -> dict[str, Any]:
    """The configuration of one run, which repeats the logged decisions; the seed is of weights.

    ``decisions``: None where all replicas train, as rows of one batch.
    """
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
        options.gpt if decisions else replace(options.gpt, micro_batch=options.replicas),
        folder,
        options.steps,
        {"drop_compute": drop} if decisions else {},
        training=training,
        learning_rate=options.learning_rate,
        data=data,
    )
