"""DropCompute in a run: latencies, completed micro-batches, step times and speed-up from the run's recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasdc.common.errors import DataError
from megasdc.dropcompute.gate import STEP_TIMES_FOLDER
from megasdc.lab.report.run_threshold import RunThreshold, search_run
from megasdc.lab.report.step_times import StepTimesOfRun, load_step_times
from megasdc.ops.run_folder.record import RunRecord


@dataclass(frozen=True)
class Drops:
    """The recorded steps of a run, and the threshold in force, ``tau_s``: infinite where there was none, [step].

    ``search``: results of every threshold on the steps without drops; None: there is no such step.
    """

    times: StepTimesOfRun
    tau_s: NDArray[np.float64]
    search: RunThreshold | None
    notes: tuple[str, ...]
    num_layers: int

    @property
    def completed(self) -> NDArray[np.float64]:
        """Micro-batches that a replica completed, [replica, step]; of an ended backward pass, the share of layers."""
        left_out = np.where(self.times.ended, 1 - self.times.layers / self.num_layers, 0.0)
        return np.asarray(self.times.completed - left_out, dtype=np.float64)

    @property
    def latencies_s(self) -> NDArray[np.float64]:
        """Forward and backward pass of each whole micro-batch on the slowest stage, any order."""
        found = np.nan_to_num(self.times.busy_of_whole_s, nan=-1.0).max(axis=1)
        return found[found >= 0]

    @property
    def step_s(self) -> NDArray[np.float64]:
        """Time of each step, [step]."""
        return self.times.step_s.max(axis=(0, 1))

    @property
    def compute_s(self) -> NDArray[np.float64]:
        """Compute time of each replica, [replica, step]."""
        return self.times.compute_s.max(axis=1)

    @property
    def gain(self) -> float | None:
        """Micro-batches per second of steps with a threshold over that of steps without; None without one kind."""
        held = np.isfinite(self.tau_s)
        if held.all() or not held.any():
            return None
        done = self.completed.sum(axis=0)
        return float((done[held].sum() / self.step_s[held].sum()) / (done[~held].sum() / self.step_s[~held].sum()))


def load_drops(run: RunRecord) -> Drops | str | None:
    """Reads the recorded times of a run with DropCompute.

    None where nothing was recorded; a sentence where the recording cannot be used.
    """
    if not (run.path / STEP_TIMES_FOLDER).is_dir():
        return None
    try:
        times = load_step_times(run.path)
    except DataError as error:
        return str(error)
    tau_s = _threshold_in_force(run, times.steps)
    rate = run.setting("megasdc.drop_compute.max_drop_rate")
    least = run.setting("megasdc.drop_compute.min_micro_batches")
    num_layers = int(run.setting("megasdc.model.num_layers") or 1)
    try:
        search = search_run(times, 0.1 if rate is None else rate, least or 1, None)
        notes: tuple[str, ...] = tuple(dict.fromkeys((*times.notes, *search.times.notes)))
    except DataError as error:
        search, notes = None, (*times.notes, str(error))
    return Drops(times, tau_s, search, notes, num_layers)


def _threshold_in_force(run: RunRecord, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Threshold of each step: as chosen by the run, or as configured after its warm-up."""
    tau_s = np.full(len(steps), np.inf)
    given = run.setting("megasdc.drop_compute.threshold")
    if isinstance(given, int | float):
        tau_s[steps > (run.setting("megasdc.drop_compute.warmup_steps") or 0)] = given
    for event in run.of("drop", "threshold"):
        chosen = event.fields.get("tau_s")
        if event.step is not None and not isinstance(given, int | float):
            tau_s[steps > event.step] = np.inf if chosen is None else chosen
    return tau_s
