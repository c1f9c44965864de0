"""Sums and features of gradients before and after the reduction, kept on the device.

Both are taken from what each rank accumulated over a step's micro-batches, before it is summed over replicas.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import accumulated_gradient, grouped_parameters, is_bf16_optimizer, owned_fragments
from megasdc.sdc.fp64.linear import draw_signs, linear_sums, residuals, squared_norm
from megasdc.sdc.outliers import Score

SUMS = ("sum", "signed sum")
FEATURES = ("norm", "largest element")


class ReductionCheck:
    """Compares linear sums of gradients before and after the reduction over replicas."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self._groups = grouped_parameters(engine.optimizer)
        self._names = [str(group.get("name", place)) for place, group in enumerate(engine.optimizer.param_groups)]
        self._signs = torch.zeros(0)
        self._sums = torch.zeros(0)
        self._exchange: Any = None

    @property
    def rounding(self) -> float:
        """Relative rounding of the type in which gradients are reduced."""
        optimizer = self._engine.optimizer
        whole = optimizer.fp32_groups_gradients_flat if is_bf16_optimizer(optimizer) else self._groups[0]
        return torch.finfo(whole[0].dtype).eps

    def before_reduction(self) -> None:
        """Compute the sums of this rank's own gradients; no sync."""
        optimizer, device = self._engine.optimizer, self._engine.device
        self._signs = draw_signs(self._engine.step_number, device)
        rows = []
        for parameters in self._groups:
            gradients = [accumulated_gradient(optimizer, one) for one in parameters]
            sums = [linear_sums(one, self._signs) for one in gradients]
            rows.append(torch.cat([torch.stack(sums).sum(0), squared_norm(gradients, device).view(1)]))
        self._sums = torch.stack(rows)

    def after_reduction(self) -> None:
        """Compute those of the shards that this rank owns, and start summing both over replicas.

        Collective: the data group.
        """
        owned = torch.zeros(len(self._groups), 2, dtype=torch.float64, device=self._engine.device)
        for fragment in owned_fragments(self._engine.optimizer):
            if fragment.gradient is not None:
                owned[fragment.group] += linear_sums(fragment.gradient, self._signs, fragment.offset)
        self._sums = torch.cat([self._sums, owned], dim=1)
        group = self._engine.mpu.get_data_parallel_group()
        self._exchange = dist.all_reduce(self._sums, group=group, async_op=True)

    def finish(self) -> tuple[float, str]:
        """The largest residual over the norm of its group, and its name.

        Sync: waits for the device.
        """
        self._exchange.wait()
        before, squares, after = self._sums[:, :2], self._sums[:, 2], self._sums[:, 3:]
        found = residuals(before, squares, after, self._engine.dims.data, self._engine.gradient_factor)
        place = int(found.argmax())
        group, kind = divmod(place, len(SUMS))
        return float(found.flatten()[place]), f"{SUMS[kind]} of the gradients of group {self._names[group]}"


class FeatureReader:
    """Computes features of the local gradient of every submodule with parameters, and gathers those of all replicas."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self._submodules = [one for one in list_submodules(engine.module) if one.parameters]
        self._gathered: list[Tensor] = []
        self._exchange: Any = None

    def before_reduction(self) -> None:
        """Compute the features and start gathering them; no sync.

        Collective: the data group; two numbers for each submodule and replica.
        """
        optimizer = self._engine.optimizer
        rows = []
        for submodule in self._submodules:
            gradients = [accumulated_gradient(optimizer, one).detach() for one in submodule.parameters.values()]
            largest = torch.stack([bound.abs().float() for one in gradients for bound in torch.aminmax(one)]).amax()
            rows.append(torch.stack([squared_norm(gradients, self._engine.device).sqrt().float(), largest]))
        # Replicas may have completed different numbers of micro-batches.
        own = torch.stack(rows) * (self._engine.micro_batches / self._engine.completed)
        self._gathered = [torch.empty_like(own) for _ in range(self._engine.dims.data)]
        group = self._engine.mpu.get_data_parallel_group()
        self._exchange = dist.all_gather(self._gathered, own, group=group, async_op=True)

    def finish(self) -> Tensor:
        """Features of all replicas, [replicas, submodules, 2], on the host.

        Sync: waits for the device.
        """
        self._exchange.wait()
        return torch.stack(self._gathered).cpu()

    def describe(self, score: Score) -> str:
        """The feature, submodule and replica of a score, as text."""
        fqn = self._submodules[score.submodule].fqn
        whose = "the replicas' median" if score.replica is None else f"replica {score.replica}"
        return f"{FEATURES[score.feature]} of the gradient of {fqn}, {whose}"


def is_finite(features: Tensor) -> bool:
    """Whether all features are finite."""
    return math.isfinite(float(features.sum()))
