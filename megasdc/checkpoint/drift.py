"""How far apart are the parameters of runs, step by step? Over the checkpoints that they keep, at any layouts.

Ma, Pei, Lausen, Karypis 2025, Understanding Silent Data Corruption in LLM Training (arXiv 2502.12340), follow the
parameter difference of a model on an unhealthy node from that on a healthy one over a training period:
||theta - theta_ref|| / ||theta_ref||, Euclidean. Theirs is of whole models; here it is of each submodule too, and what
is equal in every bit is told apart from what is merely close. The first run is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.compare_report import Options
from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.checkpoint.kinds import explain_folder
from megasdc.checkpoint.open_view import open_view
from megasdc.checkpoint.view import TENSOR_SLOTS, PieceError, Slot, View
from megasdc.errors import CheckpointError
from megasdc.model.kinds import EMBEDDING, FINAL_NORM, HEAD, NORM, POSITIONS, kind_of
from megasdc.tensors.bits import as_bits

_BLOCK = 1 << 22
_GROUPS = {EMBEDDING: "embedding", POSITIONS: "embedding", NORM: "norm", FINAL_NORM: "norm", HEAD: "head"}
OTHER = "other"


@dataclass
class Distance:
    """How far some parameters are from those of the reference.

    Attributes:
        squares: sum of (theta - theta_ref)^2 over the elements that differ in some bit.
        reference: sum of theta_ref^2.
        num_different: elements that differ in some bit.
        numel: all.
    """

    squares: float = 0.0
    reference: float = 0.0
    num_different: int = 0
    numel: int = 0

    @property
    def equal(self) -> bool:
        """Whether every bit is equal."""
        return self.num_different == 0

    @property
    def relative(self) -> float:
        """||theta - theta_ref|| / ||theta_ref||; 0 where every bit is equal; NaN with NaN or infinities."""
        if self.equal:
            return 0.0
        if self.reference == 0:
            return math.inf if self.squares else 0.0
        return math.sqrt(self.squares / self.reference)

    def add(self, other: Distance) -> None:
        """Count further parameters."""
        self.squares += other.squares
        self.reference += other.reference
        self.num_different += other.num_different
        self.numel += other.numel

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON has."""
        norms = {"difference_norm": math.sqrt(self.squares), "reference_norm": math.sqrt(self.reference)}
        numbers = {"relative": self.relative, **norms}
        return {
            "equal": self.equal,
            **{name: value if math.isfinite(value) else str(value) for name, value in numbers.items()},
            "num_different": self.num_different,
            "numel": self.numel,
        }


@dataclass
class StepDrift:
    """One run at one step.

    Attributes:
        run: its checkpoint folder.
        step: optimizer step, first is 1.
        slot: what was compared.
        submodules: by full name, in order of the pipeline.
        torn: tensors of which copies in one of the checkpoints differ; the first copy was taken.
    """

    run: str
    step: int
    slot: Slot
    submodules: dict[str, Distance] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)

    @property
    def whole(self) -> Distance:
        """Of all parameters."""
        return self._sum(lambda _: True)

    @property
    def groups(self) -> dict[str, Distance]:
        """Of all submodules of a kind: embedding, attention, mlp, norm, head."""
        names = dict.fromkeys(map(group_of, self.submodules))
        return {name: self._sum(lambda fqn, name=name: group_of(fqn) == name) for name in names}  # type: ignore[misc]

    @property
    def equal(self) -> bool:
        """Whether every bit is equal, in all copies."""
        return self.whole.equal and not self.torn

    def _sum(self, wanted: Callable[[str], bool]) -> Distance:
        total = Distance()
        for fqn, distance in self.submodules.items():
            if wanted(fqn):
                total.add(distance)
        return total

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON has."""
        return {
            "run": self.run,
            "step": self.step,
            "slot": self.slot,
            "equal": self.equal,
            "whole": self.whole.as_dict(),
            "groups": {name: one.as_dict() for name, one in self.groups.items()},
            "submodules": {name: one.as_dict() for name, one in self.submodules.items()},
            "copies_differ": self.torn,
        }


@dataclass
class DriftReport:
    """What runs came to.

    Attributes:
        reference: checkpoint folder of the first run.
        runs: of the others.
        steps: compared, by run and then in ascending order.
        lacking: by folder, steps that others keep and it does not.
        problems: what could not be read, so that its step was not compared.
        notes: what else has to be known.
    """

    reference: str
    runs: list[str]
    steps: list[StepDrift] = field(default_factory=list)
    lacking: dict[str, list[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of(self, run: str) -> list[StepDrift]:
        """The steps of one run."""
        return [one for one in self.steps if one.run == run]

    def first_divergent(self, run: str) -> StepDrift | None:
        """The first step that is not equal in every bit; null where all are."""
        return next((one for one in self.of(run) if not one.equal), None)

    def last_equal_before(self, run: str) -> int | None:
        """The last step before that; null where the first one differs already."""
        first = self.first_divergent(run)
        return max((one.step for one in self.of(run) if first is None or one.step < first.step), default=None)

    @property
    def same(self) -> bool:
        """Whether all that was compared is equal in every bit."""
        return all(one.equal for one in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON has."""
        runs = []
        for run in self.runs:
            first = self.first_divergent(run)
            runs.append(
                {
                    "run": run,
                    "first_divergent_step": None if first is None else first.step,
                    "first_divergent_submodules": [] if first is None else divergent(first),
                    "last_equal_step_before": self.last_equal_before(run),
                    "steps": [one.as_dict() for one in self.of(run)],
                }
            )
        return {
            "reference": self.reference,
            "same": self.same and not self.problems,
            "runs": runs,
            "steps_lacking": self.lacking,
            "not_compared": self.problems,
            "notes": self.notes,
        }


def divergent(one: StepDrift) -> list[str]:
    """Submodules that are not equal in every bit, in order of the pipeline."""
    torn = {submodule_of(name) for name in one.torn}
    return [fqn for fqn, distance in one.submodules.items() if not distance.equal or fqn in torn]


def measure_drift(
    folders: Sequence[Path], options: Options | None = None, progress: Callable[[int], None] | None = None
) -> DriftReport:
    """Compare the parameters of runs at every step that the first run and another both keep.

    What is compared is the first of weights, master weights and moments that both checkpoints have and ``options``
    leave. One tensor of each is held at a time.

    Args:
        folders: checkpoint folders; the first is the reference.
        options: ``only``, ``ignore`` and ``weights_only`` count; null: everything.
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
        report.notes.append(f"compared are {' and '.join(slots)} where not both have weights or they are left out")
    return report


def submodule_of(fqn: str) -> str:
    """The submodule that a parameter belongs to: its name without the last part."""
    return fqn.rpartition(".")[0] or fqn


def group_of(submodule: str) -> str:
    """The kind of a submodule, coarsely: embedding, attention, mlp, norm or head; of names that are not ours, other."""
    if "self_attention.linear" in submodule:
        return "attention"
    if ".mlp." in submodule:
        return "mlp"
    name = "0.word_embeddings" if submodule.startswith("tied_modules.embedding") else submodule
    try:
        return _GROUPS.get(kind_of(name), OTHER)
    except ValueError:
        return OTHER


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


def distance(got: Tensor, reference: Tensor) -> Distance:
    """Measure two tensors of one shape, block by block in float64.

    Types may differ: then elements differ whose values do.
    """
    found = Distance(numel=got.numel())
    for x, y in _blocks(got.reshape(-1), reference.reshape(-1)):
        wide = y.to(torch.float64)
        found.reference += float(wide.square().sum())
        differs = as_bits(x) != as_bits(y) if x.dtype == y.dtype else x.to(torch.float64) != wide
        count = int(differs.sum())
        if count:
            found.num_different += count
            found.squares += float((x[differs].to(torch.float64) - wide[differs]).square().sum())
    return found


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, a.numel(), _BLOCK):
        yield a[start : start + _BLOCK], b[start : start + _BLOCK]
