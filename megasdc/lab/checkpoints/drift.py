"""Parameter drift between runs, step by step, from the checkpoints that they keep; layouts may differ.

Ma, Pei, Lausen, Karypis 2025, Understanding Silent Data Corruption in LLM Training (arXiv 2502.12340), follow the
parameter difference of a model on an unhealthy node from that on a healthy one over a training period:
||theta - theta_ref|| / ||theta_ref||, Euclidean. Theirs is of whole models; here it is computed for each submodule too,
and bitwise equality is reported separately. The first run is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.files import explain_folder, list_steps, step_folder
from megasdc.checkpoint.views import TENSOR_SLOTS, PieceError, View
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.drift_report import DriftReport, StepDrift, submodule_of
from megasdc.lab.checkpoints.report import Options
from megasdc.lab.checkpoints.views.open import open_view
from megasdc.tensors.bits import Distance, as_bits, distance


def measure_drift(
    folders: Sequence[Path], options: Options | None = None, progress: Callable[[int], None] | None = None
) -> DriftReport:
    """Compare the parameters of runs at every step that the first run and another run both keep.

    Compared is the first of weights, master weights and moments that both checkpoints have and ``options`` select. One
    tensor of each checkpoint is in memory at a time.

    Args:
        folders: checkpoint folders; the first is the reference.
        options: only ``only``, ``ignore`` and ``weights_only`` are used; None: everything.
        progress: called with the bytes of each tensor that was read.

    Returns:
        The report; a checkpoint that cannot be read is a problem in it.

    Raises:
        CheckpointError: a folder holds no checkpoints, or no other run keeps a step that the first keeps.
    """
    kept = {folder: _steps_of(folder) for folder in dict.fromkeys(folders)}
    first, others = folders[0], list(dict.fromkeys(folders[1:]))
    report = DriftReport(str(first), [str(folder) for folder in others])
    everywhere = sorted(set().union(*kept.values()))
    for folder, steps in kept.items():
        if missing := [step for step in everywhere if step not in steps]:
            report.lacking[str(folder)] = missing
    if not any(set(kept[first]) & set(kept[folder]) for folder in others):
        listed = "; ".join(f"{folder}: {', '.join(map(str, steps))}" for folder, steps in kept.items())
        raise CheckpointError(f"no step is kept by {first} and another run, so nothing can be compared ({listed})")
    for folder in others:
        for step in (step for step in kept[folder] if step in kept[first]):
            try:
                views = [open_view(place / step_folder(step)) for place in (first, folder)]
                report.steps.append(_compare(views, str(folder), step, options or Options(), progress))
            except (CheckpointError, PieceError) as error:
                report.problems.append(f"step {step} of {folder}: {error}")
    if slots := sorted({one.slot for one in report.steps if one.slot != "weight"}):
        report.notes.append(f"compared are {' and '.join(slots)} where not both have weights or these are skipped")
    return report


def _steps_of(folder: Path) -> list[int]:
    steps = list_steps(folder)
    if not steps:
        needed = "a folder of checkpoints (step_NNNNNNNN)"
        raise CheckpointError(explain_folder(folder, needed) or f"{folder} holds no checkpoints: needed is {needed}")
    return steps


def _compare(
    views: list[View], run: str, step: int, options: Options, progress: Callable[[int], None] | None
) -> StepDrift:
    keys = [key for key in views[0].entries if key in views[1].entries and options.wants(*key)]
    slot = next((slot for slot in TENSOR_SLOTS if any(key[1] == slot for key in keys)), None)
    if slot is None:
        raise CheckpointError("no tensor is in both that --only and --ignore leave")
    found = StepDrift(run, step, slot)
    lone = {fqn for view in views for fqn, own in view.entries if own == slot and options.wants(fqn, slot)}
    if lone := lone - {fqn for fqn, own in keys if own == slot}:
        raise CheckpointError(f"only one of them has {', '.join(sorted(lone)[:3])}: they are of different models")
    for fqn, _ in (key for key in keys if key[1] == slot):
        entries = [view.entries[fqn, slot] for view in views]
        rows = {entry.real_rows for entry in entries}
        whole = [_first_copy(entry.copies, found, fqn) for entry in entries]
        if whole[0].shape != whole[1].shape and len(rows) == 1 and None not in rows:
            whole = [tensor[: next(iter(rows))] for tensor in whole]  # without the vocabulary's padding
        if whole[0].shape != whole[1].shape:
            raise CheckpointError(f"{fqn} has shape {list(whole[1].shape)}, in the first run {list(whole[0].shape)}")
        found.submodules.setdefault(submodule_of(fqn), Distance()).add(distance(whole[1], whole[0]))
        if progress is not None:
            progress(sum(entry.num_bytes for entry in entries))
    return found


def _first_copy(copies: Sequence[Any], found: StepDrift, fqn: str) -> Tensor:
    first: Tensor = copies[0].read()
    for other in (copy.read() for copy in copies[1:]):
        if not torch.equal(as_bits(first), as_bits(other)) and fqn not in found.torn:
            found.torn.append(fqn)
    return first
