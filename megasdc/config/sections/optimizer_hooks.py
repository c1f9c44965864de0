"""Entries of `optimizer_hooks`: bounds of gradients, resets of the optimizer's moments, hooks of the user."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from megasdc.config.fields import NonNegativeInt, PositiveInt, Section, setting

ABSOLUTE, SPIKE_AWARE, MOMENTUM_RESET, FILE = "absolute", "spike_aware", "momentum_reset", "file"
BOUNDS = (ABSOLUTE, SPIKE_AWARE)
BEFORE_NORM, AFTER_NORM, LOCAL = "before_norm", "after_norm", "local"
SKIP_STEP, ZERO, BOUND, HALT = "skip_step", "zero", "bound", "halt"
Threshold = float | Literal["inf"]
Point = Annotated[list[Threshold], Field(min_length=2, max_length=2)]
Theta = Threshold | Annotated[list[Point], Field(min_length=1)]


class HookSpec(Section):
    """One entry: a bound on gradients, a reset of the moments, or a hook of the user's own."""

    at_resume = "applied"

    hook: Literal["absolute", "spike_aware", "momentum_reset", "file"] = setting(
        ...,
        "absolute: |g| <= theta. spike_aware: |g| <= sqrt(theta V) where g^2 / V > theta, V the second moment before "
        "this step. momentum_reset: both moments become 0 every `interval` steps. file: a class of your own.",
    )
    theta: Theta | None = setting(
        None,
        'Bounds: threshold, "inf" for none, or a schedule of points [step, theta] with straight lines between them; '
        "needed there.",
    )
    parameters: list[str] = setting(
        ["*"],
        "Bounds and file: patterns of full names of parameters, such as `*.mlp.*`; of several bounds of one kind and "
        "place, the first that fits a parameter bounds it.",
        min_length=1,
    )
    where: Literal["before_norm", "after_norm", "local"] = setting(
        "before_norm",
        "Bounds: the reduced gradient before its norm is taken; or after it was clipped; or, absolute only, each "
        "rank's own before it is averaged over replicas.",
    )
    non_finite: Literal["skip_step", "zero", "bound", "halt"] = setting(
        "skip_step",
        "Bounds: NaN and Inf: all ranks skip the step; or they become 0; or Inf becomes the threshold with its sign "
        "and NaN 0; or all ranks end. Of several bounds that fit a parameter, the first's.",
    )
    warn_share: Annotated[float, Field(gt=0, le=1)] | None = setting(
        None, "Bounds: warn when more than this share of a submodule's elements was bounded; null: never."
    )
    grace_steps: NonNegativeInt = setting(
        20, "spike_aware: no bound in so many first steps, nor after a reset of the moments."
    )
    bias_corrected: bool = setting(False, "spike_aware: V / (1 - beta2^t) instead of V.")
    floor: Annotated[float, Field(ge=0)] | None = setting(
        None,
        "spike_aware: smallest V; null: eps^2 of the optimizer, with which no element freezes however rare its "
        "gradients are; 0: none, as published: an element with V = 0 is not bounded, and one with rare gradients, "
        "whose V decays in between, is bounded more and more.",
    )
    interval: PositiveInt = setting(500, "momentum_reset: steps n; before step n + 1, 2 n + 1, and so on.")
    warmup_steps: NonNegativeInt = setting(
        150, "momentum_reset: steps in which the learning rate rises again along a cosine."
    )
    warmup_start: Annotated[float, Field(ge=0, le=1)] = setting(
        0.01, "momentum_reset: share of the scheduled learning rate right after a reset."
    )
    restart_bias_correction: bool = setting(
        False, "momentum_reset: restart the optimizer's step count; SPAM does not, Stable-SPAM does."
    )
    path: str | None = setting(
        None, "file: Python file; it runs with all rights of the training process.", min_length=1
    )
    name: str | None = setting(
        None, "file: class in it, a subclass of `megasdc.optim.hooks.GradientHook`.", min_length=1
    )
    settings: dict[str, Any] = setting({}, "file: keyword arguments of the class.")


FIELDS_OF = {
    ABSOLUTE: {"theta", "parameters", "where", "non_finite", "warn_share"},
    SPIKE_AWARE: {"theta", "parameters", "where", "non_finite", "warn_share", "grace_steps", "bias_corrected", "floor"},
    MOMENTUM_RESET: {"interval", "warmup_steps", "warmup_start", "restart_bias_correction"},
    FILE: {"parameters", "path", "name", "settings"},
}
"""Fields that each hook reads, besides ``hook``."""
NEEDED = {ABSOLUTE: ("theta",), SPIKE_AWARE: ("theta",), MOMENTUM_RESET: (), FILE: ("path", "name")}


def theta_at(theta: Theta, step: int) -> float:
    """The threshold of one step; infinite: no bound.

    Points are interpolated linearly; if one of two is "inf", the earlier one holds between them. The first point holds
    before it, the last after it.

    Args:
        step: optimizer step, first is 1.
    """
    if not isinstance(theta, list):
        return float(theta)
    points = [(float(at), float(value)) for at, value in theta]
    for (first, low), (last, high) in pairwise(points):
        if step < last:
            inside = step > first and math.isfinite(low) and math.isfinite(high)
            return low + (high - low) * (step - first) / (last - first) if inside else low
    return points[-1][1]
