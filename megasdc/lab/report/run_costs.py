"""What a run's folder says about the costs of its steps and checkpoints."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasdc.common.errors import DataError
from megasdc.common.origin import CONFIG_FILE
from megasdc.config.load import parse_config
from megasdc.config.sections import MegasdcSection
from megasdc.ops.run_folder.record import RunRecord, is_run, load_run


@dataclass(frozen=True)
class RunCosts:
    """Medians of what a run measured, None where it did not.

    Args:
        step_s: time of a step.
        memory_stall_s: that training stood still for a snapshot in memory.
        stall_s: that it stood still for a checkpoint on the disk.
        duration_s: until the checkpoint was on the disk.
        size_bytes: of the checkpoint, all ranks.
        saves: checkpoints that were measured.
        sections: its configuration.
        notes: what is missing, a sentence each.
    """

    step_s: float | None
    memory_stall_s: float | None
    stall_s: float | None
    duration_s: float | None
    size_bytes: float | None
    saves: int
    sections: MegasdcSection | None
    notes: tuple[str, ...]


def load_run_costs(path: Path) -> RunCosts:
    """Reads the metrics and events of a run.

    Raises:
        DataError: the folder holds no run, or it cannot be read.
    """
    if not is_run(path):
        raise DataError(f"{path} holds no run; give the folder of logging.run_dir")
    run = load_run(path)
    durations = [one.fields["duration_s"] for one in run.of("save", "checkpoint") if "duration_s" in one.fields]
    stalls, notes = _values(run, "checkpoint/save_s"), list(run.notes)
    step_s = _median(run, "speed/step_s")
    if step_s is None:
        notes.append(f"{path}: no time of a step was reported, the one below is not its own")
    if not len(stalls):
        notes.append(f"{path}: no checkpoint was saved, the costs of one below are not its own")
    return RunCosts(
        step_s=step_s,
        memory_stall_s=_median(run, "memory/stalled_s"),
        stall_s=_median(run, "checkpoint/save_s"),
        duration_s=statistics.median(durations) if durations else None,
        size_bytes=_median(run, "checkpoint/bytes"),
        saves=len(stalls),
        sections=parse_config(run.config, source=str(path / CONFIG_FILE), stored=True).megasdc if run.config else None,
        notes=tuple(notes),
    )


def _values(run: RunRecord, name: str) -> np.ndarray:
    values = run.series[name].values if name in run.series else np.array([])
    return values[np.isfinite(values)]


def _median(run: RunRecord, name: str) -> float | None:
    values = _values(run, name)
    return float(np.median(values)) if len(values) else None
