"""Comparison of two or more checkpoints bit by bit: what differs, where, which rank wrote it, and the kind of damage.

Every logical tensor is compared over all checkpoints. The expected content is that of most checkpoints; on a tie, that
of files unchanged since they were saved. Being named first gives no preference.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from string import ascii_uppercase

from torch import Tensor

from megasdc.checkpoint.files import step_of
from megasdc.checkpoint.formats.pieces import Piece
from megasdc.checkpoint.views.view import GLOBAL_GENERATORS, TENSOR_SLOTS, Scalar, Slot, View, with_derived_weights
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.damage import Damage, Pattern, PieceDamage
from megasdc.lab.checkpoints.report import Finding, Options, Report
from megasdc.lab.checkpoints.tensors import compare_tensors
from megasdc.lab.checkpoints.votes import all_intact, find_expected

__all__ = ["Finding", "Options", "Report", "compare_checkpoints", "tensors_to_compare"]

_RANKLESS = ("engine/", "optimizer/")
"""Scalars that represent those of all ranks; compared only where layouts differ."""
_OF_A_LAYOUT = ("rank", "loader/")
"""Scalars whose meaning depends on the layout; compared only where all have one layout."""
_OF_ELEMENTS: tuple[Pattern, ...] = ("bit", "element", "run", "period", "scattered", "tail")


def compare_checkpoints(
    views: Sequence[View],
    options: Options | None = None,
    progress: Callable[[int], None] | None = None,
    jobs: int | None = None,
) -> Report:
    """Compare two or more checkpoints of any formats and layouts.

    Args:
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
    _compare_scalars(report, options)
    report.notes += steps_of_a_run(views) + _left_out(views, options) + [note for view in views for note in view.notes]
    report.findings = _settle(report.findings, Counter(slot for _, slot in keys))
    report.problems = list(dict.fromkeys(report.problems))
    return report


def steps_of_a_run(views: Sequence[View]) -> list[str]:
    """A note where different steps of one folder are compared; empty if not."""
    steps = {view.path.resolve(): step_of(view.path) for view in views}
    if len({path.parent for path in steps}) != 1 or None in steps.values() or len(set(steps.values())) < 2:
        return []
    named = zip(ascii_uppercase, steps.values(), strict=False)
    told = ", ".join(f"{letter} is step {step}" for letter, step in named)
    return [f"{told} of one run: differences are expected"]


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


def _compare_scalars(report: Report, options: Options) -> None:
    """Compare the scalars of all checkpoints that have some, and add differences to the report."""
    views = [view for view in report.views if "scalar" in view.slots]
    if len(views) < 2:
        return
    if options.wants("", "scalar"):
        report.problems += [problem for view in views for problem in view.problems]
    others = 0
    layouts = {(view.kind, view.layout) for view in views}
    for name in dict.fromkeys(name for view in views for name in view.scalars):
        if not options.wants(name, "scalar"):
            continue
        if name.startswith(_RANKLESS if len(layouts) == 1 else _OF_A_LAYOUT):
            continue
        holders = [(view, view.scalars[name]) for view in views if name in view.scalars]
        if len(holders) < 2:
            continue
        if name.endswith(GLOBAL_GENERATORS) and len({view.save_id for view, _ in holders}) > 1:
            others += len({scalar.value for _, scalar in holders}) > 1
            continue
        report.num_compared += 1
        _compare_scalar(report, name, holders)
    if others:
        report.notes.append(
            f"global random generators of {others} ranks differ; training does not draw from them, so between two "
            "saves that is no difference"
        )


def _compare_scalar(report: Report, name: str, holders: list[tuple[View, Scalar]]) -> None:
    classes: dict[str, list[tuple[View, Scalar]]] = {}
    for view, scalar in holders:
        if scalar.value is None:
            against = next((other for other, one in holders if one.value is not None), view)
            detail = f"{scalar.file.name} does not hold it"
            report.add((name, "scalar"), view, against, Damage("missing", detail, _place(scalar)))
        else:
            classes.setdefault(scalar.value, []).append((view, scalar))
    if len(classes) < 2:
        return
    states = [[all_intact([view.changed(one.file)]) for view, one in members] for members in classes.values()]
    right, basis = find_expected([len(members) for members in classes.values()], states)
    value, members = list(classes.items())[right]
    for found, wrong in classes.items():
        for view, scalar in wrong if found != value else ():
            detail = f"{found}, expected {value}"
            report.add((name, "scalar"), view, members[0][0], Damage("scalar", detail, _place(scalar)), basis)


def _place(scalar: Scalar) -> list[PieceDamage]:
    return [PieceDamage.whole(Piece(scalar.file, scalar.owner, 1, _nothing))]


def _nothing() -> Tensor:
    raise FileNotFoundError


def _settle(findings: list[Finding], num_tensors: Mapping[Slot, int]) -> list[Finding]:
    """Give findings with one cause the same pattern.

    In a file of which most tensors hold another state, few differing elements are not damage: one step changes few bf16
    weights. If most tensors of a slot hold another state, the pattern is drift, not a shard's.
    ``num_tensors``: number of tensors compared in each slot.
    """
    shards = Counter(file for one in findings if one.pattern == "shard" for file in one.files)
    all_of = Counter(file for one in findings if one.slot != "scalar" for file in one.files)
    other_state = {file for file, count in shards.items() if 2 * count > all_of[file] > 1}
    findings = [
        replace(one, pattern="shard") if one.pattern in _OF_ELEMENTS and one.files <= other_state else one
        for one in findings
    ]
    drifted: dict[tuple[str, Slot], set[str]] = {}
    for one in findings:
        if one.covers_all and one.pattern == "shard":
            drifted.setdefault((one.checkpoint, one.slot), set()).add(one.fqn)
    return [
        replace(one, pattern="drift")
        if one.pattern == "shard"
        and 2 * len(drifted.get((one.checkpoint, one.slot), ())) > num_tensors.get(one.slot, 0)
        else one
        for one in findings
    ]
