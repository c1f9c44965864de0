"""Momentum reset: the moments are reset at an interval of steps, then the learning rate warms up again.

Source: Huang et al., SPAM, ICLR 2025, arXiv 2501.06842; restart of the bias correction: Stable-SPAM, arXiv 2502.17055.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MomentumReset:
    """When moments are reset, and the factor of the learning rate; a function of the step only.

    Args:
        interval: steps n; resets are before step n + 1, 2 n + 1, and so on.
        warmup_steps: steps in which the factor rises to 1.
        warmup_start: factor of the step after a reset.
        restart_bias_correction: whether the optimizer's step count restarts at 0.
    """

    interval: int
    warmup_steps: int
    warmup_start: float
    restart_bias_correction: bool

    def is_due(self, step: int) -> bool:
        """Whether the moments are reset before this step."""
        return step > 1 and (step - 1) % self.interval == 0

    def restarts_count(self, before: int, step: int) -> bool:
        """Whether the optimizer's step count has restarted after the step ``before`` and before this one."""
        return self.restart_bias_correction and (before - 1) // self.interval != (step - 1) // self.interval

    def steps_since(self, step: int) -> int:
        """Steps before this one since the start or the last reset, skipped ones included."""
        return (step - 1) % self.interval

    def rate_factor(self, step: int) -> float:
        """Factor of the scheduled learning rate: a half cosine from ``warmup_start`` to 1 after a reset."""
        since = self.steps_since(step)
        if step <= self.interval or since >= self.warmup_steps:
            return 1.0
        rise = (1 - math.cos(math.pi * since / self.warmup_steps)) / 2
        return self.warmup_start + (1 - self.warmup_start) * rise

    @torch.no_grad()
    def reset(self, inner: Any) -> None:
        """Set the moments of an optimizer, the torch one that steps the flat shards, to zero.

        Sync: none.
        """
        for state in inner.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name].zero_()
            if self.restart_bias_correction and "step" in state:
                if isinstance(state["step"], Tensor):
                    state["step"].zero_()
                else:
                    state["step"] = 0
        if self.restart_bias_correction:
            for group in inner.param_groups:  # DeepSpeed's FusedAdam counts by group
                if "step" in group:
                    group["step"] = 0


class RateWarmup:
    """Multiplies the learning rates during the inner optimizer's step; ``close`` removes its hooks.

    Args:
        inner: the torch optimizer that steps the flat shards.
    """

    def __init__(self, inner: Any) -> None:
        self.factor = 1.0
        self._scheduled: list[float] = []
        self._hooks = [
            inner.register_step_pre_hook(lambda optimizer, *_: self._lower(optimizer)),
            inner.register_step_post_hook(lambda optimizer, *_: self._restore(optimizer)),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _lower(self, inner: Any) -> None:
        self._scheduled = [group["lr"] for group in inner.param_groups]
        if self.factor != 1.0:
            for group in inner.param_groups:
                group["lr"] = group["lr"] * self.factor

    def _restore(self, inner: Any) -> None:
        for group, rate in zip(inner.param_groups, self._scheduled, strict=True):
            group["lr"] = rate
