"""Checks of a checkpoint's content: shapes, replicated copies, weights against masters, finite values, counters.

``verify`` shows that files have the bytes that were saved, not that these were right: a rank with a fault in memory,
arithmetic or link saves what it has. These checks read every value once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.manifest import read_manifest
from megasdc.checkpoint.verify import (
    CHECKED,
    CheckpointReport,
    deleted_while_read,
    is_called_universal,
    verify_checkpoint,
)
from megasdc.checkpoint.views import TENSOR_SLOTS, Copy, Entry, PieceError, Slot, View
from megasdc.common.errors import CheckpointError
from megasdc.common.program import bytes_bar
from megasdc.lab.checkpoints.views.open import open_view
from megasdc.model.sharding import shard_of
from megasdc.tensors.bits import as_bits

_BLOCK = 1 << 22
_COUNTERS = {
    "the optimizer's count of steps": re.compile(r"rank \d+/group \d+/step"),
    "the step": re.compile(r"rank of .*/global_steps|run/step"),
}
"""Values that must be equal in the whole checkpoint, by description."""


def verify_contents(path: Path | str, *, checksums: bool = True, progress: bool = False) -> CheckpointReport:
    """Check every file of one checkpoint, and if all are right, their content.

    Args:
        path: folder of the checkpoint, universal or not.
        checksums: see ``verify_checkpoint``.
        progress: draw bars on standard error where it is a terminal.

    Returns:
        The report; a damaged checkpoint is not an exception.
    """
    folder = Path(path)
    report = verify_checkpoint(folder, checksums=checksums, progress=progress)
    if report.problems:
        return replace(report, contents="the files are not as they were saved")
    try:
        if reason := _why_apart(folder):
            return replace(report, contents=reason)
        view = open_view(folder)
        total = sum(entry.num_bytes for entry in view.entries.values())
        with bytes_bar(f"{folder.name}, contents", total, quiet=not progress) as advance:
            problems = check_contents(view, advance)
    except CheckpointError as error:
        problems = [str(error)]
    if not folder.exists():
        problems = [deleted_while_read(folder)]
    return replace(report, problems=problems, contents=CHECKED)


def _why_apart(folder: Path) -> str | None:
    """The reason why tensors of a checkpoint cannot be assembled here; None: they can."""
    if is_called_universal(folder):
        return None
    manifest = read_manifest(folder)
    others = {file.name for file in folder.glob("manifest.*.json")}
    if (
        manifest.node is None
        or {f"manifest.{node}.json" for node in manifest.nodes} - {f"manifest.{manifest.node}.json"} <= others
    ):
        return None
    return f"only the files of node {manifest.node} are here, and tensors lie in those of all nodes"


def check_contents(view: View, progress: Callable[[int], None] | None = None) -> list[str]:
    """Check every tensor and counter of a checkpoint; the problems, a sentence each, with tensor and file.

    Shapes and types match the layout; copies that several ranks hold are bitwise equal; weights are the master weights
    rounded to their type, as DeepSpeed does after every step; no element is NaN or infinite; every rank and every group
    of the optimizer is at the same step. ``progress`` gets the bytes of each tensor that was read.
    """
    problems = list(view.problems)
    for fqn in dict.fromkeys(fqn for fqn, _ in view.entries):
        entries = {slot: view.entries[fqn, slot] for slot in TENSOR_SLOTS if (fqn, slot) in view.entries}
        problems += [f"{fqn} has no {slot}" for slot in TENSOR_SLOTS if slot in view.slots and slot not in entries]
        held: dict[Slot, Tensor] = {}
        for slot, entry in entries.items():
            if (tensor := _check_copies(fqn, slot, entry, problems)) is not None:
                held[slot] = tensor
            if progress is not None:
                progress(entry.num_bytes)
        if "weight" in held and "master" in held:
            problems += _check_rounding(fqn, held["weight"], held["master"], entries)
    return list(dict.fromkeys(problems + _check_counters(view)))


def _check_copies(fqn: str, slot: Slot, entry: Entry, problems: list[str]) -> Tensor | None:
    """Read and compare every copy; return the first that can be read."""
    first: tuple[Copy, Tensor] | None = None
    for copy in entry.copies:
        try:
            tensor = copy.read()
        except (PieceError, CheckpointError) as error:
            problems.append(f"{slot} of {fqn}: {error}")
            continue
        problems += _check_finite(fqn, slot, tensor, copy)
        if first is None:
            first = (copy, tensor)
        elif tensor.shape != first[1].shape or tensor.dtype != first[1].dtype:
            names = ", ".join(piece.file.name for one in (first[0], copy) for piece in one.pieces)
            problems.append(f"{slot} of {fqn}: its copies have different shapes or types ({names})")
        elif count := _count_different(tensor, first[1]):
            wrong = as_bits(tensor) != as_bits(first[1])
            problems.append(
                f"{slot} of {fqn}: {count:,} of {tensor.numel():,} elements differ between copies that must be equal "
                f"({_where(first[0], wrong)}; {_where(copy, wrong)})"
            )
    return None if first is None else first[1]


def _check_finite(fqn: str, slot: Slot, tensor: Tensor, copy: Copy) -> list[str]:
    if not tensor.dtype.is_floating_point or not _count(tensor, lambda part: ~part.isfinite()):
        return []
    nans, infs = _count(tensor, torch.isnan), _count(tensor, torch.isinf)
    where = _where(copy, ~tensor.isfinite())
    return [f"{slot} of {fqn} holds {nans:,} NaN and {infs:,} infinite elements ({where})"]


def _check_rounding(fqn: str, weight: Tensor, master: Tensor, entries: dict[Slot, Entry]) -> list[str]:
    """Whether weights are the master weights, rounded to nearest even where their type is shorter."""
    if weight.shape != master.shape:
        return [f"{fqn}: the weight has shape {list(weight.shape)}, its master {list(master.shape)}"]
    rounded = master.to(weight.dtype)
    count = _count_different(weight, rounded)
    if not count:
        return []
    wrong = as_bits(weight) != as_bits(rounded)
    where = ", ".join(_where(entries[slot].copies[0], wrong) for slot in ("weight", "master"))
    return [f"{fqn}: {count:,} of {weight.numel():,} weights are not their master weights, rounded ({where})"]


def _check_counters(view: View) -> list[str]:
    """Whether all ranks and groups of the optimizer are at one step, and all stages at that of the run.

    The two may differ: the optimizer does not count a skipped step, and a momentum reset can restart its count.
    """
    problems = [
        f"{scalar.file.name} does not hold {name}" for name, scalar in view.scalars.items() if scalar.value is None
    ]
    for what, pattern in _COUNTERS.items():
        found: dict[str, list[str]] = {}
        for name, scalar in view.scalars.items():
            if scalar.value is not None and pattern.fullmatch(name):
                found.setdefault(f"{float(scalar.value):g}", []).append(f"{name} in {scalar.file.name}")
        if len(found) > 1:
            usual = max(found, key=lambda step: len(found[step]))
            rare = "; ".join(f"{step}: {', '.join(names)}" for step, names in found.items() if step != usual)
            problems.append(f"{what} is {usual}, but {rare}")
    return problems


def _where(copy: Copy, wrong: Tensor) -> str:
    """Files and owners of the pieces that have elements marked in ``wrong``."""
    names: dict[str, None] = {}
    for tp_rank, shard in enumerate(copy.shards):
        flat = shard_of(wrong, copy.split, len(copy.shards), tp_rank).reshape(-1)
        for piece, part in zip(shard, flat.split([piece.numel for piece in shard]), strict=True):
            if bool(part.any()):
                names[f"{piece.file.name} of {piece.owner}"] = None
    return ", ".join(names)


def _count_different(a: Tensor, b: Tensor) -> int:
    return _count(a, lambda part, other: as_bits(part) != as_bits(other), b)


def _count(tensor: Tensor, test: Callable[..., Tensor], *others: Tensor) -> int:
    """Number of elements for which a test holds, computed block by block."""
    flat: list[Any] = [one.reshape(-1) for one in (tensor, *others)]
    return sum(
        int(test(*(one[start : start + _BLOCK] for one in flat)).sum()) for start in range(0, tensor.numel(), _BLOCK)
    )
