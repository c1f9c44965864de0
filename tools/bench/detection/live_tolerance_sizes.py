"""Size of an injected fault in the units of the toleranced checks, from what the injector did, not from a check.

Faults of the reduction and of the update are measured by the elements that were changed; faults of what gradients come
from, by the gradient features of the same step without the fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.common.addresses import REDUCED_GRAD, UPDATE
from megasdc.config.sections.faults import COLLECTIVE
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.faults.injector import Firing
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import accumulated_gradient, grouped_parameters, owned_fragments
from megasdc.sdc.fp64.adam import AdamSlice, adam_step
from megasdc.sdc.fp64.linear import PERIOD, draw_signs
from megasdc.sdc.outliers import Outliers
from megasdc.train.detection.toleranced import PAST, REDUCTION, REPLICAS, FeatureReader, TolerancedChecks, is_finite
from megasdc.train.detection.toleranced import UPDATE as CHECK_OF_UPDATE
from megasdc.train.detection.update_check import settings_of, slice_of

STATES = {"master": 0, "exp_avg": 1, "exp_avg_sq": 2}
"""Place of a state in ``AdamSlice.tensors``."""


@dataclass
class Seen:
    """Values of one step that faults are measured against; thresholds are those before it, of the checks that have one.

    ``norms`` [groups] are of all replicas' gradients before the reduction; ``magnitudes`` of the terms of each shard's
    update, by id of the flat partition; ``features`` [replicas, submodules, features] before any fault of the
    reduction; ``scales`` the usual distances across replicas and from the past, each [submodules, features].
    """

    thresholds: dict[str, float]
    norms: Tensor
    magnitudes: dict[int, AdamSlice]
    features: Tensor
    scales: tuple[Tensor, Tensor]


class Witness(Hook):
    """Keeps for each step what faults are measured against; put it after the checks.

    ``features`` is the state of the outliers at this position of the layout, from ``TolerancedChecks.state_dict``.
    """

    def __init__(self, engine: TrainingEngine, checks: TolerancedChecks, features: Mapping[str, Any]) -> None:
        self._engine = engine
        self._checks = checks
        self._parameters = {
            (one.fqn, slot): parameter
            for one in list_submodules(engine.module)
            for slot, parameter in one.parameters.items()
        }
        self._reader = FeatureReader(engine)
        self._outliers = Outliers()
        self._outliers.load_state_dict(dict(features))
        self._thresholds: dict[str, float] = {}
        self._norms = torch.zeros(0)
        self._magnitudes: dict[int, AdamSlice] = {}
        inner = engine.optimizer.optimizer
        self._hook = inner.register_step_pre_hook(lambda inner, *_: self._take(inner))
        self.kept: dict[int, Seen] = {}

    def before_step(self, run: Run) -> None:
        """Read the thresholds."""
        known = self._checks.thresholds.items()
        self._thresholds = {name: value for name, value in known if value is not None}
        self._magnitudes = {}

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Take norms and features."""
        squares = []
        for parameters in grouped_parameters(engine.optimizer):
            gradients = [accumulated_gradient(engine.optimizer, one).detach().double() for one in parameters]
            squares.append(torch.stack([(one * one).sum() for one in gradients]).sum())
        self._norms = torch.stack(squares)
        dist.all_reduce(self._norms, group=engine.mpu.get_data_parallel_group())
        self._norms.sqrt_()
        self._reader.before_reduction()

    def _take(self, inner: Any) -> None:
        """Of every shard that is about to be stepped, how large the terms of its update are."""
        for group in inner.param_groups:
            for flat in group["params"]:
                state = inner.state[flat]
                before = AdamSlice(flat.detach(), state["exp_avg"], state["exp_avg_sq"])
                settings = settings_of(type(inner), group)
                self._magnitudes[id(flat)] = adam_step(before, flat.grad, state["step"].double() + 1, settings)[1]

    def after_step(self, run: Run, result: StepResult) -> None:
        """Keep the step."""
        features, scales = self._reader.finish(), self._outliers.scales()
        assert scales is not None, "the warm-up measures them"
        self.kept[run.step] = Seen(self._thresholds, self._norms, self._magnitudes, features, scales)
        if result.skipped is None and is_finite(features):  # the others are left out by the checks too
            self._outliers.score(features)

    def close(self) -> None:
        """Take the hook in the optimizer away."""
        self._hook.remove()

    # --- sizes --------------------------------------------------------------------------------------------------

    def size_of(self, firing: Firing) -> tuple[str, float] | None:
        """The check that looks at the value changed by a firing on this rank, and the size of the change in thresholds.

        None where no check looks at it.
        """
        address, optimizer = firing.address, self._engine.optimizer
        slot, _, state = address.slot.partition(".")
        parameter = self._parameters[address.fqn, slot]
        change = torch.tensor(firing.after, dtype=torch.float64) - torch.tensor(firing.before, dtype=torch.float64)
        places, seen = torch.tensor(firing.indices), self.kept[address.step]
        if address.phase == COLLECTIVE:
            of_groups = enumerate(grouped_parameters(optimizer))
            group = next(place for place, of in of_groups if any(one is parameter for one in of))
            return REDUCTION, self._of_sums(change, places, address.step, float(seen.norms[group]))
        if address.phase not in (REDUCED_GRAD, UPDATE):
            return None
        fragment = next(one for one in owned_fragments(optimizer) if one.parameter is parameter)
        if address.phase == UPDATE:
            return self._of_update(change, places + fragment.start, fragment.flat, state, address.step)
        of_sum, norm = change * self._engine.dims.data, float(seen.norms[fragment.group])
        return REDUCTION, self._of_sums(of_sum, places + fragment.offset, address.step, norm)

    def _of_sums(self, change: Tensor, places: Tensor, step: int, norm: float) -> float:
        """By the larger change of the two linear sums."""
        signs = draw_signs(step, torch.device("cpu"))[places % PERIOD]
        moved = max(abs(float(change.sum())), abs(float((change * signs).sum())))
        return moved / norm / self.kept[step].thresholds[REDUCTION]

    def _of_update(
        self, change: Tensor, places: Tensor, flat: Tensor, state: str, step: int
    ) -> tuple[str, float] | None:
        """By the largest change of an element in the slice of this step, in roundings of its terms."""
        part, seen = slice_of(flat.numel(), step), self.kept[step]
        inside = (places >= part.start) & (places < part.stop)
        if not inside.any():
            return None
        kind = torch.finfo(flat.dtype)
        terms = seen.magnitudes[id(flat)].tensors[STATES[state]][places[inside]]
        moved = float((change[inside].abs() / (kind.eps * terms + kind.tiny)).max())
        return CHECK_OF_UPDATE, moved / seen.thresholds[CHECK_OF_UPDATE]


def feature_sizes(clean: Seen, harmed: Seen) -> dict[str, float]:
    """Changes of the gradient features at this position of the layout by a fault, by check, in thresholds."""
    moved = []
    for seen in (clean, harmed):
        logs = seen.features.double().clamp_min(torch.finfo(torch.float32).tiny).log()
        center = logs.quantile(0.5, 0)
        moved.append((logs - center, center))
    across, past = ((new - old).abs().nan_to_num(nan=math.inf) for old, new in zip(*moved, strict=True))
    sizes = {REPLICAS: across / clean.scales[0], PAST: past / clean.scales[1]}
    return {name: float(one.max()) / clean.thresholds[name] for name, one in sizes.items()}
