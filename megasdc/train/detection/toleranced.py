"""Checks with tolerances measured in the run: warnings with numbers, which prove nothing about a rank."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.outliers import Outliers
from megasdc.sdc.tolerance import Tolerance
from megasdc.train.detection.gradient_checks import FeatureReader, ReductionCheck, is_finite
from megasdc.train.detection.update_check import UpdateCheck
from megasdc.train.process.signals import StopSignals

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
class Finding:
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
        values = {REDUCTION: Finding(*reduction, None), UPDATE: Finding(*updates, self._dims.rank)}
        scores = self._outliers.score(features) if is_finite(features) else None
        for name, score in zip((REPLICAS, PAST), scores or (), strict=False):
            values[name] = Finding(score.value, self._features.describe(score), self._rank_of(score.replica))
        own = [values.get(name, Finding(UNKNOWN, "", None)) for name in UNITS]
        largest = torch.tensor([one.value for one in own], dtype=torch.float64).nan_to_num(nan=math.inf)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._host_group)
        for name, value, mine in zip(UNITS, largest.tolist(), own, strict=True):
            if value != UNKNOWN:
                self._judge(run, name, value, mine)

    def _rank_of(self, replica: int | None) -> int | None:
        """The rank of another replica at this rank's position."""
        return None if replica is None else self._dims.rank + (replica - self._dims.dp_rank) * self._dims.tensor

    def _judge(self, run: Run, name: str, value: float, own: Finding) -> None:
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
