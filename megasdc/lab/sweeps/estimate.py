"""Estimated duration of a sweep, from a few steps of one run of each shape, as many at once as later."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from typing import Any

from megasdc.data.manifest import digest_settings
from megasdc.lab.sweeps.outcome import Outcome
from megasdc.lab.sweeps.plan import PlannedRun, measured_folder
from megasdc.lab.sweeps.run_process import start_ranks, warm_up
from megasdc.lab.sweeps.runner import write_config
from megasdc.metrics.writer import read_metrics
from megasdc.parallel.processes import fork_server

PROBE_FOLDER = ".probe"
PROBE_STEPS = 6
"""Steps of a probe; the first ones warm up and are not counted."""
WARM_STEPS = 2


@dataclass(frozen=True)
class Speed:
    """Duration of runs of one shape; ``step_s`` is with as many runs at once as later.

    ``overhead_s``: seconds of a run besides its steps: start, evaluation, save.
    """

    step_s: float
    overhead_s: float

    def seconds(self, run: PlannedRun) -> float:
        """Duration of one run."""
        return self.overhead_s + self.step_s * steps_of(run)


def steps_of(run: PlannedRun) -> int:
    """Steps that a run takes itself, after its start checkpoint."""
    return run.last_step - (0 if run.start is None else run.start.steps_done)


def shape_of(run: PlannedRun) -> str:
    """Digest of the settings that determine the cost of a step: model, batch, layout, study."""
    own, batch = (
        run.config["megasdc"],
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    )
    kept = {
        "model": own["model"],
        "parallel": own["parallel"],
        "study": own["study"],
        "length": own["data"]["sequence_length"],
        "ranks": run.ranks,
    }
    return digest_settings({**kept, **{key: run.config.get(key) for key in batch}})


def measure_speeds(runs: Iterable[PlannedRun], folder: Path, workers: int) -> dict[str, Speed]:
    """Runs the first steps of one run of each shape, an unhealthy one where there is one, ``workers`` copies at once.

    A folder in the sweep's is created and removed. Speeds are by shape; those whose first steps fail are omitted, since
    their runs will report the cause.
    """
    chosen: dict[str, PlannedRun] = {}
    for run in sorted(runs, key=lambda run: run.healthy):
        chosen.setdefault(shape_of(run), run)
    context = fork_server()
    warm_up(context)
    try:
        speeds = {shape: _probe(run, folder / PROBE_FOLDER, workers, context) for shape, run in chosen.items()}
        return {shape: speed for shape, speed in speeds.items() if speed is not None}
    finally:
        shutil.rmtree(folder / PROBE_FOLDER, ignore_errors=True)


def _probe(run: PlannedRun, scratch: Path, workers: int, context: Any) -> Speed | None:
    began = time.monotonic()
    ranks = []
    folders = [scratch / f"{run.run_id}_{slot}" for slot in range(workers)]
    try:
        for slot, folder in enumerate(folders):
            folder.mkdir(parents=True)
            steps = min(PROBE_STEPS, run.config["megasdc"]["training"]["steps"])
            config = write_config(run, folder, stop_step=steps)
            ranks.append(start_ranks(context, config, folder, run.ranks, slot))
        for one in ranks:
            while one.settle() is None:
                wait(one.sentinels)
    finally:
        for one in ranks:
            one.end()
    wall = time.monotonic() - began
    measured = [seconds for folder in folders if (seconds := _step_seconds(measured_folder(run, folder))) is not None]
    if not measured:
        return None
    step_s = median(measured)
    return Speed(step_s, max(0.0, wall - steps * step_s))


def _step_seconds(folder: Path) -> float | None:
    rows = [row for row in read_metrics(folder) if "speed/step_s" in row]
    if not rows:
        return None
    return median(row["speed/step_s"] for row in rows[min(WARM_STEPS, len(rows) - 1) :])


def speeds_from(runs: Iterable[PlannedRun], outcomes: dict[str, Outcome]) -> dict[str, Speed]:
    """Speeds from finished runs, by shape; their overhead is contained in the seconds of a step."""
    found: dict[str, list[float]] = {}
    for run in runs:
        outcome = outcomes.get(run.run_id)
        if outcome is not None and not any(outcome.exit_codes) and outcome.seconds:
            found.setdefault(shape_of(run), []).append(outcome.seconds / max(1, steps_of(run)))
    return {shape: Speed(median(seconds), 0.0) for shape, seconds in found.items()}


def estimate_s(runs: Sequence[PlannedRun], speeds: dict[str, Speed], workers: int) -> float | None:
    """Seconds until all runs are done; None where the speed of a shape is not known."""
    if any(shape_of(run) not in speeds for run in runs):
        return None
    seconds = [speeds[shape_of(run)].seconds(run) for run in runs]
    return max(sum(seconds) / workers, max(seconds, default=0.0))
