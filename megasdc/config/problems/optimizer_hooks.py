"""Problems of the entries of `optimizer_hooks` and `hooks`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megasdc.common.user_code import file_of, is_found
from megasdc.config.problems.problem import Problem
from megasdc.config.sections.megasdc import MegasdcSection
from megasdc.config.sections.optimizer_hooks import (
    ABSOLUTE,
    AFTER_NORM,
    BOUNDS,
    FIELDS_OF,
    FILE,
    LOCAL,
    MOMENTUM_RESET,
    NEEDED,
    SKIP_STEP,
    SPIKE_AWARE,
    HookSpec,
    Theta,
)
from megasdc.config.submodule_names import parameter_names

SMALLEST_THETA = {ABSOLUTE: 1.1754944e-38, SPIKE_AWARE: 1.0}
"""Exclusive lower limits of thresholds: the smallest normal fp32 number; and 1, since at or below it the V of a bounded
element would shrink for ever and the element would freeze."""


def hook_problems(file: MegasdcSection, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield every problem of the hooks; ``deepspeed`` has defaults filled in."""
    names = parameter_names(file.model, file.parallel) if file.optimizer_hooks else []
    for place, spec in enumerate(file.optimizer_hooks):
        path = f"megasdc.optimizer_hooks.{place}"
        yield from gradient_hook_problems(spec, path, deepspeed)
        for pattern in spec.parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                yield Problem(
                    (f"{path}.parameters",),
                    f"got {pattern!r}, which matches no parameter; names are such as {', '.join(names[:2])} and "
                    f"{names[-1]}.",
                )
    if file.optimizer_hooks and file.model.backend != "torch":
        yield Problem(
            ("megasdc.optimizer_hooks", "megasdc.model.backend"),
            f'got entries with megasdc.model.backend "{file.model.backend}", whose parameters have no full names; set '
            'the backend to "torch".',
        )
    yield from bound_problems(deepspeed) if file.optimizer_hooks else ()
    yield from _idle_problems(file, names)
    resets = [place for place, spec in enumerate(file.optimizer_hooks) if spec.hook == MOMENTUM_RESET]
    if len(resets) > 1:
        yield Problem(
            (f"megasdc.optimizer_hooks.{resets[1]}.hook",),
            "got a second momentum_reset; keep one.",
        )


def gradient_hook_problems(spec: HookSpec, path: str, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with one entry by itself, or with DeepSpeed's keys.

    Args:
        path: where it is in its file.
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
"""DeepSpeed's keys that are incompatible with hooks, and why."""


def user_hook_problems(file: MegasdcSection) -> Iterator[Problem]:
    """Yield the hooks of the user's own whose file or module is not there; nothing of them is run."""
    for place, entry in enumerate(file.hooks):
        if not is_found(entry.hook):
            kind = "file" if file_of(entry.hook) else "module"
            yield Problem(
                (f"megasdc.hooks.{place}.hook",),
                f"got {entry.hook!r}, whose {kind} is not found; a file is looked for from the folder of the launch, a "
                "module there and where Python looks for packages (PYTHONPATH, pip install).",
                of_host=True,
            )


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


def _idle_problems(file: MegasdcSection, names: list[str]) -> Iterator[Problem]:
    """Entries that would never have an effect, or that would make another check fail."""
    yield from covered_problems(file.optimizer_hooks, "megasdc.optimizer_hooks", names)
    resets = [spec for spec in file.optimizer_hooks if spec.hook == MOMENTUM_RESET]
    for place, spec in enumerate(file.optimizer_hooks):
        path = f"megasdc.optimizer_hooks.{place}"
        if spec.hook == SPIKE_AWARE:
            most = min([file.training.steps, *(reset.interval for reset in resets)])
            if spec.grace_steps >= most:
                yield Problem(
                    (f"{path}.grace_steps",),
                    f"got {spec.grace_steps}; with {most} steps to the end or the next reset it would never bound "
                    "anything; set a smaller one.",
                )
        if spec.hook == MOMENTUM_RESET and spec.warmup_steps >= spec.interval:
            yield Problem(
                (f"{path}.warmup_steps", f"{path}.interval"),
                f"got {spec.warmup_steps} with interval {spec.interval}; the learning rate would never reach its "
                "schedule; set fewer.",
            )


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
