"""Entries of `optimizer_hooks` with their checks, and of `hooks`.

The former are bounds of gradients, resets of the optimizer's moments and hooks of the user on gradients; the latter are
classes of the user's own that are called in a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megasdc.config.fields import NonNegativeInt, PositiveInt, Problem, Section, setting

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


class UserHookSpec(Section):
    """One entry: a class, and how it is made; a text alone is its `hook`."""

    at_resume = "applied"

    hook: str = setting(
        ...,
        "`module:Class`, of a module in the folder of the launch or where Python looks for packages, or "
        "`file.py:Class`; a subclass of `megasdc.Hook`. It runs with all rights of the training process.",
        pattern=r"^[^:]+:[A-Za-z_][A-Za-z_0-9]*$",
    )
    options: dict[str, Any] = setting({}, "Keyword arguments of the class.")


def _in_full(entry: Any) -> Any:
    return {"hook": entry} if isinstance(entry, str) else entry


UserHook = Annotated[UserHookSpec, BeforeValidator(_in_full)]


SMALLEST_THETA = {ABSOLUTE: 1.1754944e-38, SPIKE_AWARE: 1.0}
"""Exclusive lower limits of thresholds: the smallest normal fp32 number; and 1, since at or below it the V of a bounded
element would shrink for ever and the element would freeze."""


def gradient_hook_problems(spec: HookSpec, path: str, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems of one entry by itself, or with DeepSpeed's keys.

    Args:
        path: dotted path of the entry in its file.
    """
    yield from _field_problems(spec, path)
    if spec.theta is not None and spec.hook in BOUNDS:
        yield from _theta_problems(spec.theta, spec, path)
    if spec.hook in BOUNDS:
        yield from _bound_problems(spec, path, deepspeed)


UNSUPPORTED = {
    ("zero_optimization", "offload_optimizer"): "gradients are then stored where no hook reads them",
    ("zero_optimization", "round_robin_gradients"): "shards are then distributed differently",
    ("zero_optimization", "parameter_alignment"): "shards then hold paddings between parameters",
    ("bf16", "bf16_optimizer_states"): "the second moment must be fp32",
    ("fp16", "fp16_master_weights_and_grads"): "the second moment must be fp32",
}
"""DeepSpeed's keys that are incompatible with hooks, with the reasons."""


def bound_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield DeepSpeed's settings with which no gradient can be bounded."""
    for (section, key), reason in UNSUPPORTED.items():
        value = deepspeed.get(section, {}).get(key)
        if value and not (isinstance(value, dict) and value.get("device") in (None, "none")):
            yield Problem(
                (f"{section}.{key}", "megasdc.optimizer_hooks"),
                f"got {json.dumps(value)} with megasdc.optimizer_hooks; {reason}; remove one of them.",
            )


def covered_problems(specs: Sequence[HookSpec], path: str, names: Collection[str]) -> Iterator[Problem]:
    """Yield bounds that bound no parameter, since earlier ones of their kind and place do; ``names``: of parameters."""
    taken: set[tuple[str, str, str]] = set()
    for place, spec in enumerate(specs):
        if spec.hook not in BOUNDS:
            continue
        fitting = {
            (spec.hook, spec.where, name)
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in spec.parameters)
        }
        if fitting and fitting <= taken:
            yield Problem(
                (f"{path}.{place}.parameters",),
                f"got {spec.parameters}, but earlier entries of hook {spec.hook} and the same place fit all of "
                "these parameters, and the first that fits counts; put this entry before them.",
            )
        taken |= fitting


def _field_problems(spec: HookSpec, path: str) -> Iterator[Problem]:
    for field in sorted(HookSpec.model_fields.keys() - FIELDS_OF[spec.hook] - {"hook"}):
        if getattr(spec, field) == HookSpec.model_fields[field].default:
            continue
        users = [hook for hook, fields in FIELDS_OF.items() if field in fields]
        yield Problem(
            (f"{path}.{field}", f"{path}.hook"),
            f"got a value, but hook {spec.hook} does not read it (only {', '.join(users)} do); remove it.",
        )
    for field in NEEDED[spec.hook]:
        if getattr(spec, field) is None:
            yield Problem((f"{path}.{field}", f"{path}.hook"), f"missing; {spec.hook} needs it.")
    if spec.hook == FILE and spec.path is not None and not Path(spec.path).is_file():
        yield Problem((f"{path}.path",), f"got {spec.path!r}, which is not a file; give a Python file.", of_host=True)


def _theta_problems(theta: Theta, spec: HookSpec, path: str) -> Iterator[Problem]:
    smallest = SMALLEST_THETA[spec.hook]
    points = [(float(at), float(value)) for at, value in theta] if isinstance(theta, list) else [(1.0, float(theta))]
    for _, value in points:
        if value <= smallest:
            reason = "; at 1 and below, bounded elements would freeze" if spec.hook == SPIKE_AWARE else ""
            yield Problem(
                (f"{path}.theta",),
                f'got {value:g}; a threshold of {spec.hook} is above {smallest:g}, or "inf"{reason}.',
            )
    steps = [at for at, _ in points]
    if any(at < 1 or not at.is_integer() for at in steps) or steps != sorted(set(steps)):
        yield Problem(
            (f"{path}.theta",),
            f"got steps {steps}; steps of a schedule are whole numbers from 1 on, each larger than the one before.",
        )


def _bound_problems(spec: HookSpec, path: str, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    if spec.hook == SPIKE_AWARE and spec.where == LOCAL:
        yield Problem(
            (f"{path}.where", f"{path}.hook"),
            'got "local" with spike_aware; only the owner of a shard has the second moment; use absolute, or '
            '"before_norm".',
        )
    fp16 = deepspeed.get("fp16", {})
    if fp16.get("enabled") and not fp16.get("loss_scale") and spec.non_finite != SKIP_STEP:
        yield Problem(
            (f"{path}.non_finite", "fp16.loss_scale"),
            f'got "{spec.non_finite}" with a dynamic loss scale, which finds its value by overflows; use "skip_step", '
            "or a constant fp16.loss_scale.",
        )
    if spec.where == AFTER_NORM and spec.non_finite != SKIP_STEP:
        yield Problem(
            (f"{path}.non_finite", f"{path}.where"),
            f'got "{spec.non_finite}" with where "after_norm", where gradients are finite already; remove it, or use '
            '"before_norm".',
        )
    clipping = deepspeed.get("gradient_clipping", 0.0)
    if spec.where == AFTER_NORM and spec.hook == ABSOLUTE and clipping and _never_reached(spec, clipping):
        yield Problem(
            (f"{path}.theta", "gradient_clipping"),
            f"got {spec.theta} after the norm was clipped to {clipping:g}; no element is ever larger than that; set a "
            "smaller one.",
        )


def _never_reached(spec: HookSpec, clipping: float) -> bool:
    """Whether no finite threshold is below the largest norm."""
    values = [value for _, value in spec.theta] if isinstance(spec.theta, list) else [spec.theta]
    finite = [float(value) for value in values if value is not None and math.isfinite(float(value))]
    return bool(finite) and min(finite) >= clipping
