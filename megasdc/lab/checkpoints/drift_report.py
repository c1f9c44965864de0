"""Report of parameter drift: runs against a reference at each step that both keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megasdc.checkpoint.views import Slot
from megasdc.lab.checkpoints.outcome import ComparisonOutcome
from megasdc.model.kinds import EMBEDDING, FINAL_NORM, HEAD, NORM, POSITIONS, submodule_kind
from megasdc.tensors.bits import Distance

_GROUPS = {EMBEDDING: "embedding", POSITIONS: "embedding", NORM: "norm", FINAL_NORM: "norm", HEAD: "head"}
OTHER = "other"


@dataclass
class StepDrift:
    """Drift of one run at one step.

    Attributes:
        run: its checkpoint folder.
        step: optimizer step, first is 1.
        submodules: by full name, in order of the pipeline.
        torn: tensors whose copies within one of the checkpoints differ; the first copy was used.
    """

    run: str
    step: int
    slot: Slot
    submodules: dict[str, Distance] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)

    @property
    def whole(self) -> Distance:
        """Distance over all parameters."""
        return self._sum(lambda _: True)

    @property
    def groups(self) -> dict[str, Distance]:
        """Distance by kind of submodule: embedding, attention, mlp, norm, head, other."""
        names = dict.fromkeys(map(category_of, self.submodules))
        return {name: self._sum(lambda fqn, name=name: category_of(fqn) == name) for name in names}  # type: ignore[misc]

    @property
    def equal(self) -> bool:
        """Whether all copies are bitwise equal."""
        return self.whole.equal and not self.torn

    def _sum(self, wanted: Callable[[str], bool]) -> Distance:
        total = Distance()
        for fqn, distance in self.submodules.items():
            if wanted(fqn):
                total.add(distance)
        return total

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
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
class DriftReport(ComparisonOutcome):
    """Drift of all runs.

    Attributes:
        reference: checkpoint folder of the first run.
        runs: checkpoint folders of the others.
        steps: steps compared, by run and then ascending.
        lacking: by folder, steps that others keep and this one does not.
    """

    reference: str
    runs: list[str]
    steps: list[StepDrift] = field(default_factory=list)
    lacking: dict[str, list[int]] = field(default_factory=dict)

    def of(self, run: str) -> list[StepDrift]:
        """The compared steps of one run."""
        return [one for one in self.steps if one.run == run]

    def first_divergent(self, run: str) -> StepDrift | None:
        """The first step that is not bitwise equal; None if all are."""
        return next((one for one in self.of(run) if not one.equal), None)

    def last_equal_before(self, run: str) -> int | None:
        """The last equal step before it, or of all if none differs; None if the first one differs."""
        first = self.first_divergent(run)
        return max((one.step for one in self.of(run) if first is None or one.step < first.step), default=None)

    @property
    def same(self) -> bool:
        """Whether all steps are bitwise equal."""
        return all(one.equal for one in self.steps)

    def details(self) -> dict[str, Any]:
        """Runs and their steps."""
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
            "runs": runs,
            "steps_lacking": self.lacking,
        }


def divergent(one: StepDrift) -> list[str]:
    """Submodules that are not bitwise equal, in order of the pipeline."""
    torn = {submodule_of(name) for name in one.torn}
    return [fqn for fqn, distance in one.submodules.items() if not distance.equal or fqn in torn]


def submodule_of(fqn: str) -> str:
    """The submodule of a parameter: its name without the last part."""
    return fqn.rpartition(".")[0] or fqn


def category_of(submodule: str) -> str:
    """The kind of a submodule: embedding, attention, mlp, norm or head; ``other`` for unknown names."""
    if "self_attention.linear" in submodule:
        return "attention"
    if ".mlp." in submodule:
        return "mlp"
    name = "0.word_embeddings" if submodule.startswith("tied_modules.embedding") else submodule
    try:
        return _GROUPS.get(submodule_kind(name), OTHER)
    except ValueError:
        return OTHER
