"""The same faults judged by rules that training frameworks have today.

Source: Megatron-core 0.16.1, ``rerun_state_machine.py``: a result is rejected if it is not finite, or if it is at
least 10 times the largest value of the first 100 (``is_unexpectedly_large``; the loss by ``pretrain_gpt.py``, the norm
of each gradient bucket by ``param_and_grad_buffer.py`` with ``--check-for-large-grads``). Here the largest value is
that of the clean steps of the same layout and type, and the norm that of the whole gradient, which steps have.
torchtitan's self-replay (pull requests 4333 and 4334): the same rank computes the first micro-batch twice and compares
the gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.detection.live_cases import ALONE, ALWAYS, CLEAN, ONCE, PAIR, SOMETIMES
from tools.bench.detection.live_trial import LiveTrial

FACTOR = 10.0
"""Megatron's ``SPIKY_LOSS_FACTOR``, and its factor for large gradients."""
DEVIATIONS = 6.0
"""Robust standard deviations from the median beyond which a gradient norm is an outlier."""
OTHERS = {
    "lm-resiliency 0.2.0": "not run: it needs CUDA (its replays call torch.cuda.synchronize and torch.cuda.Event, no "
    "other way: detection/layer_replay.py) and at least 3 replicas; it replays saved inputs every 50 steps, when "
    "a transient fault is gone, and by its own account one-shot faults are outside its guarantee",
}
"""Other rules, and why they are not scored."""


@dataclass(frozen=True)
class Normal:
    """Losses in nats and gradient norms of clean steps of one layout and type."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]

    def is_nan(self, trial: LiveTrial) -> bool:
        """Whether loss or gradient norm is not finite."""
        return not (math.isfinite(trial.loss) and math.isfinite(trial.grad_norm))

    def is_spike(self, trial: LiveTrial) -> bool:
        """Megatron's rule for the loss."""
        return math.isfinite(trial.loss) and abs(trial.loss) >= FACTOR * max(self.losses)

    def is_large(self, trial: LiveTrial) -> bool:
        """Megatron's rule for gradients."""
        return math.isfinite(trial.grad_norm) and trial.grad_norm >= FACTOR * max(self.norms)

    def is_outlier(self, trial: LiveTrial) -> bool:
        """Whether the gradient norm is far from the median, on the scale of the median absolute deviation."""
        center = statistics.median(self.norms)
        scale = 1.4826 * statistics.median(abs(norm - center) for norm in self.norms)
        return math.isfinite(trial.grad_norm) and abs(trial.grad_norm - center) > DEVIATIONS * scale


RULES = {
    "NaN check": Normal.is_nan,
    "loss spike, Megatron": Normal.is_spike,
    "large gradients, Megatron": Normal.is_large,
    "gradient norm outlier": Normal.is_outlier,
    "self-replay, torchtitan": lambda normal, trial: trial.replayed,
}
"""Rules by name; each returns whether it raises an alarm."""


def compare_with_today(trials: Sequence[LiveTrial]) -> dict[str, dict[str, Any]]:
    """Alarms of each rule over the faults of one rank in the audited micro-batch, and over clean steps.

    By rule: alarms among harmful faults by persistence, among clean steps, and each total; "ours" is the audit's.
    """
    cells: dict[tuple[str, str], list[LiveTrial]] = {}
    for trial in trials:
        if trial.row == CLEAN:
            cells.setdefault((trial.layout, trial.precision), []).append(trial)
    normal = {
        cell: Normal(tuple(one.loss for one in of_cell), tuple(one.grad_norm for one in of_cell))
        for cell, of_cell in cells.items()
    }
    groups = {
        persistence: [
            one for one in trials if one.row in (ALONE, PAIR) and one.harmed and one.persistence == persistence
        ]
        for persistence in (ONCE, SOMETIMES, ALWAYS)
    }
    groups[CLEAN] = [trial for trial in trials if trial.row == CLEAN]
    found: dict[str, dict[str, Any]] = {"faults or steps": {name: len(group) for name, group in groups.items()}}
    for rule, raises in RULES.items():
        found[rule] = {
            name: sum(raises(normal[one.layout, one.precision], one) for one in group) for name, group in groups.items()
        }
    found["ours"] = {name: sum(one.detected for one in group) for name, group in groups.items()}
    return found
