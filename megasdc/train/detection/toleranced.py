"""Checks with tolerances measured in the run: warnings with numbers, which prove nothing about a rank.

Sums and features of gradients before and after the reduction, kept on the device.

Both are taken from what each rank accumulated over a step's micro-batches, before it is summed over replicas.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import accumulated_gradient, grouped_parameters, is_bf16_optimizer, owned_fragments
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.fp64.linear import draw_signs, linear_sums, residuals, squared_norm
from megasdc.sdc.outliers import Outliers, Score
from megasdc.sdc.tolerance import Tolerance
from megasdc.train.detection.update_check import UpdateCheck
from megasdc.train.process.signals import StopSignals

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


logger = logging.getLogger(__name__)

EVENT_KIND = "sdc"
REDUCTION, UPDATE, REPLICAS, PAST = "reduction", "update", "replicas", "past"
UNITS = {
    REDUCTION: "of the gradient's norm",
    UPDATE: "roundings",
    REPLICAS: "usual distances from the replicas' median",
    PAST: "usual distances from the past",
}
"""Every check, and the unit of its values."""
FACTORS = {REDUCTION: 10.0, UPDATE: 10.0, REPLICAS: 4.0, PAST: 8.0}
"""Multiple of the upper quartile of clean values that is unusual; the last two are distances of logarithms."""

UNKNOWN = -1.0
"""Placeholder for a value that is not known yet; values are not negative."""


@dataclass(frozen=True)
class UnusualValue:
    """The most unusual value of a check, in its unit, at one rank's position.

    Args:
        place: description of the value.
        rank: of the value; None: several.
    """

    value: float
    place: str
    rank: int | None


class ShardReader(Hook):
    """Hook for the reduction check: reads the shards that this rank owns, after faults were injected into them."""

    def __init__(self, reduction: ReductionCheck) -> None:
        self._reduction = reduction

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Read the shards, before gradient bounds change them."""
        self._reduction.after_reduction()


class TolerancedChecks(Hook):
    """Checks gradient reduction, updates and gradient features of every step, and warns of unusual values.

    Args:
        signals: of this process, through which a warning requests an audit; None: it requests none.

    Attributes:
        shards: the hook that reads the reduced gradients; a hook of its own, since it comes after fault injection and
            this one, which reads local gradients, before it.
    """

    saved_as = "TolerancedChecks"

    def __init__(self, engine: TrainingEngine, signals: StopSignals | None) -> None:
        self._signals = signals
        self._reduction = ReductionCheck(engine)
        self._features = FeatureReader(engine)
        self._outliers = Outliers()
        self._update: UpdateCheck | None = None
        floors = {REDUCTION: self._reduction.rounding, UPDATE: 4.0, REPLICAS: 4.0, PAST: 4.0}
        self._tolerances = {name: Tolerance(FACTORS[name], floors[name]) for name in UNITS}
        self.shards: Hook = ShardReader(self._reduction)
        self._host_group: Any = None
        self._dims = engine.dims

    @property
    def thresholds(self) -> dict[str, float | None]:
        """Current threshold of each check; None: not measured yet."""
        return {name: one.threshold for name, one in self._tolerances.items()}

    def on_start(self, run: Run) -> None:
        """Start the check of updates."""
        self._host_group = run.host_group
        self._update = UpdateCheck(run.engine)

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Read this rank's own gradients."""
        self._reduction.before_reduction()
        self._features.before_reduction()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Judge the step, the same on all ranks; skipped steps are not judged."""
        assert self._update is not None, "on_start comes first"
        reduction, features = self._reduction.finish(), self._features.finish()
        if result.skipped is not None:
            self._update.drop()
            return
        updates = self._update.finish()
        values = {REDUCTION: UnusualValue(*reduction, None), UPDATE: UnusualValue(*updates, self._dims.rank)}
        scores = self._outliers.score(features) if is_finite(features) else None
        for name, score in zip((REPLICAS, PAST), scores or (), strict=False):
            values[name] = UnusualValue(score.value, self._features.describe(score), self._rank_of(score.replica))
        own = [values.get(name, UnusualValue(UNKNOWN, "", None)) for name in UNITS]
        largest = torch.tensor([one.value for one in own], dtype=torch.float64).nan_to_num(nan=math.inf)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._host_group)
        for name, value, mine in zip(UNITS, largest.tolist(), own, strict=True):
            if value != UNKNOWN:
                self._judge(run, name, value, mine)

    def _rank_of(self, replica: int | None) -> int | None:
        """The rank of another replica at this rank's position."""
        return None if replica is None else self._dims.rank + (replica - self._dims.dp_rank) * self._dims.tensor

    def _judge(self, run: Run, name: str, value: float, own: UnusualValue) -> None:
        tolerance = self._tolerances[name]
        known = tolerance.threshold
        unusual = tolerance.judge(value)
        if known is None and tolerance.threshold is not None and self._dims.rank == 0:
            logger.info("check %s warns above %.3g %s from now on", name, tolerance.threshold, UNITS[name])
            run.events.emit(EVENT_KIND, "threshold", step=run.step, check=name, threshold=tolerance.threshold)
        if not unusual:
            return
        found = max(gather_objects(own, self._host_group), key=lambda one: one.value)
        if self._dims.rank != 0:
            return
        text = "step %d: check %s: %s: %.3g %s, warned of above %.3g; this is no proof that a rank is wrong"
        logger.warning(text, run.step, name, found.place, value, UNITS[name], known)
        run.events.emit(
            EVENT_KIND,
            "warning",
            step=run.step,
            check=name,
            value=value,
            threshold=known,
            unit=UNITS[name],
            seen_on=found.rank,
            place=found.place,
            audit_requested=self._signals is not None,
        )
        if self._signals is not None:
            self._signals.request_audit()

    def state_dict(self) -> dict[str, Any]:
        """Clean values of each check, and past features of each position of the layout."""
        own = self._outliers.state_dict() if self._dims.dp_rank == 0 else None
        states = gather_objects(own, self._host_group)
        return {
            "tolerances": {name: one.state_dict() for name, one in self._tolerances.items()},
            "layout": self._dims.layout,
            "features": {str(rank): state for rank, state in enumerate(states) if state is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``; in another layout gradients are divided differently, so measurement starts again."""
        if state["layout"] != self._dims.layout:
            return
        for name, tolerance in self._tolerances.items():
            tolerance.load_state_dict(state["tolerances"][name])
        self._outliers.load_state_dict(state["features"][str(self._dims.first_replica_rank)])

    def close(self) -> None:
        """Remove the update check's hook."""
        if self._update is not None:
            self._update.close()
