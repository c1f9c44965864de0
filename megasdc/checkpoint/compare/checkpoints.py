"""Comparison of two or more checkpoints bit by bit: what differs, where, which rank wrote it, and the kind of damage.

Every logical tensor is compared over all checkpoints. The expected content is that of most checkpoints; on a tie, that
of files unchanged since they were saved. Being named first gives no preference.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

from megasdc.checkpoint.compare.report import Finding, Options, Report
from megasdc.checkpoint.compare.scalars import compare_scalars
from megasdc.checkpoint.compare.settle import settle
from megasdc.checkpoint.compare.tensors import compare_tensors
from megasdc.checkpoint.views.view import TENSOR_SLOTS, Slot, View, with_derived_weights
from megasdc.errors import CheckpointError

__all__ = ["Finding", "Options", "Report", "compare_checkpoints", "tensors_to_compare"]


def compare_checkpoints(
    views: Sequence[View],
    options: Options | None = None,
    progress: Callable[[int], None] | None = None,
    jobs: int | None = None,
) -> Report:
    """Compare two or more checkpoints of any formats and layouts.

    Args:
        views: the checkpoints.
        options: what is compared; None: everything, exactly.
        progress: called with the bytes of each tensor that was read.
        jobs: threads; None: as many as there are cores for this process.

    Returns:
        The report; a file that cannot be read is a problem in it, and its content is not compared.

    Raises:
        CheckpointError: they have no tensor in common that the options select.
    """
    views = with_derived_weights(views)
    report, options = Report(views), options or Options()
    keys = tensors_to_compare(views, options)
    if not any(sum(key in view.entries for view in views) > 1 for key in keys):
        listed = "; ".join(f"{view.path} ({view.kind}) has {', '.join(view.slots)}" for view in views)
        raise CheckpointError(f"no tensor is in two of them that --only and --ignore leave: {listed}")
    compare_tensors(report, options, keys, jobs or len(os.sched_getaffinity(0)), progress or (lambda _: None))
    compare_scalars(report, options)
    report.notes += _left_out(views, options) + [note for view in views for note in view.notes]
    report.findings = settle(report.findings, Counter(slot for _, slot in keys))
    report.problems = list(dict.fromkeys(report.problems))
    return report


def tensors_to_compare(views: Sequence[View], options: Options) -> list[tuple[str, Slot]]:
    """Tensors that at least two checkpoints can have."""
    keys = dict.fromkeys(key for view in views for key in view.entries)
    shared = [slot for slot in TENSOR_SLOTS if sum(slot in view.slots for view in views) > 1]
    return [key for key in keys if key[1] in shared and options.wants(*key)]


def _left_out(views: Sequence[View], options: Options) -> list[str]:
    """Notes: slots that some formats have and others do not, with the checkpoints that lack them."""
    notes = []
    for slot in TENSOR_SLOTS:
        without = [str(view.path) for view in views if slot not in view.slots]
        if options.wants("", slot) and 0 < len(without) < len(views):
            notes.append(f"{slot} is not in the format of {', '.join(without)}")
    return notes
