"""Choice of the bound of each parameter and of its limit in a step: functions of the configured entries only.

Between two gradients of a rare element V decays, so eq. 1 alone bounds it ever more, until its update is negligible to
Adam's eps. Hence V' = max(V, eps^2) by default: eq. 1 unchanged wherever V is at least eps^2, and below it
- never frozen: a bounded element gets g^2 = theta V' and has V <= (beta2 + (1 - beta2) theta) V' then, and eps^2 <= V',
  so g / (sqrt(V) + eps) >= sqrt(theta) / (sqrt(beta2 + (1 - beta2) theta) + 1), whatever V was. Without a bound it is
  at most 1 / sqrt(1 - beta2). The quotient is the share of its update that a bounded gradient keeps at least: 0.05 to
  0.96 for theta 10 to 10,000 and beta2 0.999 to 0.95. Bias correction makes eps less relative to sqrt(V): more share
  (fp16 gradients: where the loss scale lifts sqrt(theta) eps above the type's smallest number);
- no gain for an outlier: then V >= (1 - beta2) theta eps^2, so that fraction is at most sqrt(theta) /
  (sqrt((1 - beta2) theta) + 1) <= sqrt(theta / (beta2 + (1 - beta2) theta)), which eq. 1 itself grants to a large V.

Source: Pei, Lausen, Karypis, IEEE Micro 2025, 10.1109/MM.2025.3642709, eq. 1; Huang et al., SPAM, arXiv 2501.06842.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megasdc.config.sections.optimizer_hooks import ABSOLUTE, BOUND, SKIP_STEP, SPIKE_AWARE, ZERO, HookSpec, theta_at
from megasdc.tensors.bound_limits import ElementLimits


@dataclass(frozen=True)
class BoundRule:
    """Bounds of one parameter at one place.

    Args:
        absolute: the first absolute bound that matches; None: none does.
        spike: the first spike-aware one.
        policy: for NaN and Inf, of the first bound that matches.
    """

    absolute: HookSpec | None = None
    spike: HookSpec | None = None
    policy: str = SKIP_STEP


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a full name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def bound_rule(name: str, specs: Sequence[HookSpec], place: str) -> BoundRule:
    """Bounds of a parameter, by its full name, at one of ``megasdc.optim.bounds.PLACES``: the first of each kind."""
    fitting = [
        spec
        for spec in specs
        if spec.hook in (ABSOLUTE, SPIKE_AWARE) and spec.where == place and fits(name, spec.parameters)
    ]
    if not fitting:
        return BoundRule()
    return BoundRule(
        absolute=next((spec for spec in fitting if spec.hook == ABSOLUTE), None),
        spike=next((spec for spec in fitting if spec.hook == SPIKE_AWARE), None),
        policy=fitting[0].non_finite,
    )


def may_act(spec: HookSpec, step: int) -> bool:
    """Whether a bound may change an element at this step (first is 1)."""
    return spec.non_finite in (ZERO, BOUND) or (spec.theta is not None and math.isfinite(theta_at(spec.theta, step)))


def limits_at(
    rule: BoundRule, step: int, scale: float, *, floor: float | None = None, v_factor: float = 1.0
) -> ElementLimits:
    """Limits of a parameter's elements in a step, at this loss scale.

    ``floor`` is the smallest V, None: the spike-aware bound does not act in this step; V is multiplied by ``v_factor``.
    """
    absolute, spike = rule.absolute, None if floor is None else rule.spike
    return ElementLimits(
        absolute=math.inf if absolute is None or absolute.theta is None else theta_at(absolute.theta, step),
        spike=math.inf if spike is None or spike.theta is None else theta_at(spike.theta, step),
        floor=floor or 0.0,
        v_factor=v_factor,
        scale=scale,
        non_finite=rule.policy if rule.policy in (ZERO, BOUND) else "keep",
    )
