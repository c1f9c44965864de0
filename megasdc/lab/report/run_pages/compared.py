"""Comparison of runs with a healthy one: losses step by step, relative increase of the final loss; pure.

Pei, Lausen, Karypis 2025 (IEEE Micro, 10.1109/MM.2025.3642709) compare the final loss of a run on an unhealthy node
with that of the healthy one: (L_u / L_h - 1), in percent. A run is a worse case where that is above 0.5 %. Runs that
diverge or end with NaN are counted separately. Here the increase is taken at the last step that both have reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megasdc.ops.run_folder.record import RunRecord
from megasdc.output.figure import Series, number_or_none

WORSE = 0.005
"""Relative increase of the final loss above which a run is a worse case."""
LOSS, EVAL_LOSS = "train/loss", "eval/loss"


@dataclass(frozen=True)
class ComparedRun:
    """One run compared with the healthy one, at the last step at which both have a loss; None there: no such step.

    ``loss`` is NaN where it is not finite; ``increase``: (loss / healthy - 1); ``eval_increase``: likewise at the last
    step that both evaluated; ``first_difference``: first step at which losses differ; ``largest``: relative difference
    of largest magnitude, and its step; ``num_non_finite``: losses that are NaN or infinite.
    """

    run: RunRecord
    at_step: int | None
    loss: float
    increase: float | None
    eval_loss: float | None
    eval_increase: float | None
    first_difference: int | None
    largest: tuple[float, int] | None
    num_non_finite: int

    @property
    def verdict(self) -> str:
        """Verdict in a word or two."""
        if self.at_step is None:
            return "not comparable"
        if not math.isfinite(self.loss):
            return "NaN"
        if self.first_difference is None:
            return "equal"
        if self.increase is not None and self.increase > WORSE:
            return "worse"
        return "within 0.5 %"


def compare_with_healthy(healthy: RunRecord, others: Sequence[RunRecord]) -> list[ComparedRun]:
    """Compares each run with the healthy one."""
    return [_compare(healthy, other) for other in others]


def _compare(healthy: RunRecord, other: RunRecord) -> ComparedRun:
    steps, ours, theirs = common(healthy.series.get(LOSS), other.series.get(LOSS))
    _, eval_ours, eval_theirs = common(healthy.series.get(EVAL_LOSS), other.series.get(EVAL_LOSS))
    different = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    relative = relative_difference(ours, theirs)
    finite = np.isfinite(relative)
    worst = int(np.abs(np.where(finite, relative, 0.0)).argmax()) if finite.any() else None
    evaluated = other.series.get(EVAL_LOSS)
    loss = other.series.get(LOSS)
    return ComparedRun(
        run=other,
        at_step=int(steps[-1]) if len(steps) else None,
        loss=float(theirs[-1]) if len(steps) else math.nan,
        increase=number_or_none(relative[-1]) if len(steps) else None,
        eval_loss=None if evaluated is None else float(evaluated.values[-1]),
        eval_increase=number_or_none(relative_difference(eval_ours, eval_theirs)[-1]) if len(eval_ours) else None,
        first_difference=int(steps[different.argmax()]) if different.any() else None,
        largest=None if worst is None else (float(relative[worst]), int(steps[worst])),
        num_non_finite=0 if loss is None else int((~np.isfinite(loss.values)).sum()),
    )


def common(one: Series | None, other: Series | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that both have, and the values of each there."""
    if one is None or other is None:
        return np.array([], dtype=np.int64), np.array([]), np.array([])
    steps, mine, theirs = np.intersect1d(one.steps, other.steps, assume_unique=True, return_indices=True)
    return steps, one.values[mine], other.values[theirs]


def relative_difference(healthy: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(other / healthy - 1); NaN where that is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = other / healthy - 1
    return np.where(np.isfinite(found), found, np.nan)
