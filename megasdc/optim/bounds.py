"""Gradient bounds: rule and limit of each parameter, all shards of a rank in one pass, agreement of ranks, and reports.

Bounds are applied before the norm by default; else one outlier in the norm would make clipping scale all else to 0.

Between two gradients of a rare element V decays, so eq. 1 alone bounds it ever more, until its update is negligible to
Adam's eps. Hence V' = max(V, eps^2) by default: eq. 1 unchanged wherever V is at least eps^2, and below it
- never frozen: a bounded element gets g^2 = theta V' and has V <= (beta2 + (1 - beta2) theta) V' then, and eps^2 <= V',
  so g / (sqrt(V) + eps) >= sqrt(theta) / (sqrt(beta2 + (1 - beta2) theta) + 1), whatever V was. Without a bound it is
  at most 1 / sqrt(1 - beta2). The quotient is the share of its update that a bounded gradient keeps at least: 0.05 to
  0.96 for theta 10 to 10,000 and beta2 0.999 to 0.95. Bias correction makes eps less relative to sqrt(V): more share
  (fp16 gradients: where the loss scale lifts sqrt(theta) eps above the type's smallest number);
- no gain for an outlier: then V >= (1 - beta2) theta eps^2, so that fraction is at most sqrt(theta) /
  (sqrt((1 - beta2) theta) + 1) <= sqrt(theta / (beta2 + (1 - beta2) theta)), which eq. 1 itself grants to a large V.

Adam's V averages gradients after the clip of the norm. A gradient that is bounded before the norm is not clipped yet,
so eq. 1, g^2 / V > theta, would compare unlike things: with steps clipped by a factor c it acts as theta c^2. V divided
by the mean of c^2 (``ClipFactors``), with the weights that V gives its steps, is the mean of unclipped g^2, weighted by
c^2: exactly what V would be if c or g^2 did not change.

``MomentumReset`` resets the moments at an interval of steps, then the learning rate warms up again.

Source: Pei, Lausen, Karypis, IEEE Micro 2025, 10.1109/MM.2025.3642709, eq. 1; Huang et al., SPAM, ICLR 2025, arXiv
2501.06842; restart of the bias correction: Stable-SPAM, arXiv 2502.17055.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasdc.config.hooks import (
    ABSOLUTE,
    AFTER_NORM,
    BEFORE_NORM,
    BOUND,
    BOUNDS,
    HALT,
    LOCAL,
    MOMENTUM_RESET,
    SKIP_STEP,
    SPIKE_AWARE,
    ZERO,
    HookSpec,
    theta_at,
)
from megasdc.events import EventLog
from megasdc.optim.zero1 import (
    StepControl,
    accumulated_gradient,
    clip_factor,
    counts_here,
    is_copied,
    loss_scale,
    owned_fragments,
    shard_checksum,
)
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.tensors.bound import bound_
from megasdc.tensors.bound_limits import SUMS, ElementLimits

logger = logging.getLogger(__name__)

EVENT_KIND = "bounds"


@dataclass(frozen=True)
class BoundRule:
    """Bounds of one parameter at one place.

    Args:
        absolute: the first absolute bound that matches; None: none does.
        spike: the first spike-aware bound that matches; None: none does.
        policy: policy for NaN and Inf, of the first bound that matches.
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


@dataclass
class ClipFactors:
    """Weighted mean of squared clip factors of the steps in a second moment.

    Args:
        beta: beta2 of the moment.
        squares: sum of c^2 by weight.
        weight: sum of weights, 0 before the first step, near 1 after many.
    """

    beta: float
    squares: float = 0.0
    weight: float = 0.0

    def add(self, factor: float) -> None:
        """Count a step that the optimizer took, clipped by this factor."""
        self.squares = self.beta * self.squares + (1 - self.beta) * factor**2
        self.weight = self.beta * self.weight + (1 - self.beta)

    def clear(self) -> None:
        """Forget all factors, since the moment was set to 0."""
        self.squares = self.weight = 0.0

    @property
    def unclipping(self) -> float:
        """Factor that turns V into one of unclipped gradients; 1 without clip, and before the first step."""
        return self.weight / self.squares if self.squares > 0 else 1.0


@dataclass(frozen=True)
class MomentumReset:
    """Schedule of resets of the moments, with the factor of the learning rate; a function of the step only.

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
        """Number of steps before this one since the start or the last reset, skipped ones included."""
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


def momentum_reset_of(specs: Sequence[HookSpec]) -> MomentumReset | None:
    """Schedule of resets of moments among the hooks; None: they are never reset."""
    for spec in specs:
        if spec.hook == MOMENTUM_RESET:
            return MomentumReset(spec.interval, spec.warmup_steps, spec.warmup_start, spec.restart_bias_correction)
    return None


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


LARGEST_NORM = 3.4e38
"""Largest value of fp32, in which DeepSpeed computes norms."""
PLACES = (LOCAL, BEFORE_NORM, AFTER_NORM)
COLUMNS = (*SUMS, "elements")
"""Counts of each parameter: ``megasdc.tensors.bound_limits.SUMS``, and the number of elements seen."""
_SQUARES, _NAN, _INF, _RATIO = (SUMS.index(name) for name in ("squares", "nan", "inf", "largest_ratio"))


@dataclass(frozen=True)
class BoundedGradient:
    """Results of a pass over the reduced gradients of a step, summed over all ranks and the same on each.

    Args:
        norm: 2-norm of the whole gradient after bounding, loss scale included.
        skip: number of NaN and Inf elements whose policy skips the step.
        halt: number of those whose policy ends the run.
        failed: number of ranks that could not apply another hook.
        copies: of each tensor rank sum of squares, and digest of the bits, of the shards of parameters that every
            tensor rank holds; zeros where there is one tensor rank.
    """

    norm: float
    skip: float
    halt: float
    failed: float
    copies: list[list[float]]


class ShardBounds:
    """Bounds the gradients that a rank owns; all ranks agree on their norm, and on whether the step is taken.

    Args:
        engine: DeepSpeed's, with ZeRO 1 or 2.
        names: full name of each parameter of the stage; a tied copy has the name of its original.
        specs: the entries of the configuration; those that are neither bounds nor resets of moments are ignored.
        host_group: a host group of all ranks, for objects.
        events: this rank's event log.

    Attributes:
        reset: resets of the moments; None: there are none.
    """

    def __init__(
        self,
        engine: Any,
        names: Mapping[nn.Parameter, str],
        specs: Sequence[HookSpec],
        dims: ParallelDims,
        host_group: dist.ProcessGroup | None,
        events: EventLog,
    ) -> None:
        self._engine, self._optimizer, self._specs = engine, engine.optimizer, specs
        self._dims, self._group, self._events = dims, host_group, events
        optimizer, self.reset = engine.optimizer, momentum_reset_of(specs)
        self.names = list(names.values())
        self._parameters = list(names)
        self._places = {id(parameter): place for place, parameter in enumerate(names)}
        self.rules = {place: [bound_rule(name, specs, place) for name in self.names] for place in PLACES}
        device = self._parameters[0].device
        self.table = torch.zeros(len(PLACES), len(self.names), len(COLUMNS), dtype=torch.float64, device=device)
        self.last_pass = torch.zeros(len(self.names), len(SUMS), dtype=torch.float64, device=device)
        self.local_pass = self.last_pass
        self._taken: dict[int, int] = {}
        betas = sorted({group["betas"][1] for group in optimizer.optimizer.param_groups})
        self.clips = {beta: ClipFactors(beta) for beta in betas}

        def chosen(wanted: Iterator[bool]) -> Tensor:
            return torch.tensor(list(wanted), dtype=torch.float64, device=device)

        self._whole = torch.tensor([one.numel() for one in names], dtype=torch.float64, device=device)
        self._owned = torch.zeros_like(self._whole)
        for fragment in owned_fragments(optimizer):
            self._owned[self._places[id(fragment.parameter)]] += fragment.numel
        self.counted = [counts_here(one, dims.tp_rank) for one in self._parameters]
        self._counted = chosen(iter(self.counted))
        self._compared = [dims.tensor > 1 and is_copied(one) for one in self._parameters]
        self._copied = chosen(iter(self._compared))
        self._halting = {place: chosen(rule.policy == HALT for rule in rules) for place, rules in self.rules.items()}
        self._kept = {
            place: chosen(rule.policy in (SKIP_STEP, HALT) for rule in rules) for place, rules in self.rules.items()
        }
        self._adam = {
            id(flat): (group["betas"][1], group["eps"])
            for group in optimizer.optimizer.param_groups
            for flat in group["params"]
        }

    def acts(self, place: str) -> bool:
        """Whether any parameter has a rule at a place."""
        return any(rule != BoundRule() for rule in self.rules[place])

    def changes(self, step: int) -> bool:
        """Whether any rank may change gradients before the norm at this step; the same on all ranks."""
        bounding = (spec for spec in self._specs if spec.hook in BOUNDS and spec.where == BEFORE_NORM)
        return any(may_act(spec, step) for spec in bounding)

    @torch.no_grad()
    def bound_local(self, step: int) -> None:
        """Bound this rank's own accumulated gradients, before they are averaged in a step, of which the first is 1.

        Sync: none.
        """
        sums, scale = self._begin(), loss_scale(self._engine)
        for place, parameter in enumerate(self._parameters):
            rule = self.rules[LOCAL][place]
            gradient = accumulated_gradient(self._optimizer, parameter).view(-1)
            bound_(gradient, None, limits_at(rule, step, scale), sums[place])
        self._end(LOCAL, sums)
        self.local_pass = sums

    @torch.no_grad()
    def bound_reduced(self, step: int, *, failed: bool = False) -> BoundedGradient:
        """Bound the owned shards of the reduced gradients in place, before their norm is taken, on all ranks.

        Args:
            step: optimizer step, first is 1.
            failed: whether this rank could not apply another hook.

        Returns:
            The pass's results over all ranks, with NaN and Inf of the local gradients included.

        Raises:
            RuntimeError: a parameter has no reduced gradient.

        Collective: all ranks of the world; one reduction of a few numbers.
        Sync: waits for the device, in place of DeepSpeed's own read of the norm; with ``bias_corrected`` and PyTorch's
        fused AdamW on a GPU, whose step count is on the GPU, also once for each of its groups.
        """
        sums, scale = self._begin(), loss_scale(self._engine)
        copied: list[Tensor] = []
        for fragment in owned_fragments(self._optimizer):
            place = self._places[id(fragment.parameter)]
            if fragment.gradient is None:
                raise RuntimeError(f"{self.names[place]} has no reduced gradient in {type(self._optimizer).__name__}")
            moment = fragment.states(self._optimizer).get("exp_avg_sq")
            rule = self.rules[BEFORE_NORM][place]
            limits = self._limits_of(rule, fragment.flat, step, scale, moment is not None, unclip=True)
            bound_(fragment.gradient, moment, limits, sums[place])
            if self._compared[place]:
                copied.append(fragment.gradient)
        self._end(BEFORE_NORM, sums)
        bad = (sums[:, _NAN] + sums[:, _INF]) * self._kept[BEFORE_NORM]
        halting = bad * self._halting[BEFORE_NORM]
        skipping = bad - halting
        if self.acts(LOCAL):
            bad = (self.local_pass[:, _NAN] + self.local_pass[:, _INF]) * self._kept[LOCAL]
            halting = halting + bad * self._halting[LOCAL]
            skipping = skipping + bad * (1 - self._halting[LOCAL])
        squares = sums[:, _SQUARES]
        of_copies = (squares * self._copied).sum().unsqueeze(0)
        copies = torch.zeros(self._dims.tensor, 3, dtype=torch.float64, device=sums.device)
        copies[self._dims.tp_rank] = torch.cat([of_copies, shard_checksum(copied, sums.device)])
        own = [(squares * self._counted).sum(), skipping.sum(), halting.sum(), copies.new_tensor(float(failed))]
        reduced = torch.cat([torch.stack(own), copies.flatten()])
        dist.all_reduce(reduced)
        reduced = reduced.cpu()
        whole, skip, halt, failures = reduced[:4].tolist()
        return BoundedGradient(math.sqrt(whole), skip, halt, failures, reduced[4:].view(copies.shape).tolist())

    def decide(self, step: int, bounded: BoundedGradient, control: StepControl, *, changed: bool = False) -> str | None:
        """Set norm and skip of the step that the optimizer is about to take.

        Args:
            changed: whether another hook may have changed gradients, so that DeepSpeed's norm is not theirs.

        Returns:
            Why no rank takes the step, as a sentence, the same on all ranks; None: all take it.

        Collective: all ranks of the world, where there is NaN or Inf.
        """
        reason = None
        if bounded.skip or bounded.halt:
            reason = self._explain(step, "halt" if bounded.halt else "skip_step")
        elif bounded.norm > LARGEST_NORM:
            reason = f"the norm of the gradient is {bounded.norm:.3g}, more than fp32 holds"
        changed = changed or self.changes(step)
        control.decide(self.table.new_tensor(bounded.norm) if changed else None, reason is not None)
        return reason

    def _explain(self, step: int, action: str) -> str:
        """Sentence on the place of NaN or Inf; writes an event on every rank that has some."""
        own = self._first_non_finite()
        found = [(rank, one) for rank, one in enumerate(gather_objects(own, self._group)) if one is not None]
        if own is not None:
            where, parameter, nan, inf = own
            fields: dict[str, Any] = {"where": where, "parameter": parameter, "nan": nan, "inf": inf, "action": action}
            self._events.emit(EVENT_KIND, "non_finite", step=step, **fields)
        rank, (where, parameter, nan, inf) = min(found, key=lambda one: one[1][0] != LOCAL)
        others = sum(one[0] == where for _, one in found) - 1
        more = f", and on {others} more ranks" if others else ""
        whose = f"as rank {rank} accumulated it" if where == LOCAL else f"in the shard of rank {rank}"
        return f"the gradient of {parameter} has {nan} NaN and {inf} Inf {whose}{more}"

    @torch.no_grad()
    def bound_clipped(self, inner: Any, step: int) -> None:
        """Bound the gradients that an optimizer is about to use, after clipping by norm.

        Args:
            inner: the torch optimizer, with the flat shards of one or all groups.
            step: optimizer step, first is 1.

        Sync: none.
        """
        sums = torch.zeros_like(self.last_pass)
        looked_at = torch.zeros_like(self._owned)
        stepped = {id(flat) for group in inner.param_groups for flat in group["params"]}
        for fragment in owned_fragments(self._optimizer):
            if id(fragment.flat) not in stepped or fragment.flat.grad is None:
                continue
            place = self._places[id(fragment.parameter)]
            rule = self.rules[AFTER_NORM][place]
            moment = fragment.states(self._optimizer).get("exp_avg_sq")
            gradient = fragment.flat.grad.narrow(0, fragment.start, fragment.numel)
            limits = self._limits_of(rule, fragment.flat, step, 1.0, moment is not None, unclip=False)
            bound_(gradient, moment, limits, sums[place])
            looked_at[place] = fragment.numel
        self._end(AFTER_NORM, sums, looked_at)

    def _first_non_finite(self) -> tuple[str, str, int, int] | None:
        """First parameter with NaN or Inf in this step: (place, name, number of NaN, of Inf); None: all were finite.

        Sync: waits for the device.
        """
        passes = {LOCAL: self.local_pass} if self.acts(LOCAL) else {}
        for place, sums in {**passes, BEFORE_NORM: self.last_pass}.items():
            for name, (nan, inf) in zip(self.names, sums[:, [_NAN, _INF]].tolist(), strict=True):
                if nan or inf:
                    return place, name, round(nan), round(inf)
        return None

    def _begin(self) -> Tensor:
        self._taken.clear()
        self.last_pass = torch.zeros_like(self.last_pass)
        return self.last_pass

    def _end(self, place: str, sums: Tensor, stepped: Tensor | None = None) -> None:
        table = self.table[PLACES.index(place)]
        looked_at = self._whole if place == LOCAL else self._owned
        add_counts(table, torch.cat([sums, (looked_at if stepped is None else stepped).unsqueeze(1)], dim=1))

    def _limits_of(
        self, rule: BoundRule, flat: Tensor, step: int, scale: float, has_moment: bool, *, unclip: bool
    ) -> ElementLimits:
        """Limits of the elements of a parameter; ``unclip``: the gradient is not clipped yet, as those in V are."""
        spike = rule.spike
        if spike is None or not has_moment or self._in_grace(spike, step):
            return limits_at(rule, step, scale)
        beta, eps = self._adam[id(flat)]
        floor = eps**2 if spike.floor is None else spike.floor
        correction = 1.0
        if spike.bias_corrected:
            if id(flat) not in self._taken:
                self._taken[id(flat)] = self._steps_taken(flat)
            taken = self._taken[id(flat)]
            if taken == 0:
                return limits_at(rule, step, scale)
            correction = 1 / (1 - beta**taken)
        unclipping = self.clips[beta].unclipping if unclip else 1.0
        floor, factor = (min(value * unclipping, sys.float_info.max) for value in (floor, correction))
        return limits_at(rule, step, scale, floor=floor, v_factor=factor)

    def count_clip(self, norm: float) -> None:
        """Count a step that the optimizer has taken, whose gradient had this norm before it was clipped."""
        factor = clip_factor(norm, float(self._optimizer.clip_grad))
        for one in self.clips.values():
            one.add(factor)

    def totals(self) -> Totals:
        """Counts of all ranks since the last report, every parameter once; the same on all ranks.

        Collective: all ranks of the world.
        Sync: waits for the device.
        """
        table, largest = self.table.clone(), self.table[:, :, _RATIO].clone()
        dist.all_reduce(table, group=self._engine.data_parallel_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._engine.data_parallel_group)
        table[:, :, _RATIO] = largest
        own: Totals = {}
        if self._dims.dp_rank == 0:
            for place, rows in zip(PLACES, table.tolist(), strict=True):
                counted = zip(self.names, rows, self.counted, strict=True)
                own[place] = {name: row for name, row, counts in counted if counts and row[-1]}
        found: Totals = {}
        for one in gather_objects(own, self._group):
            found = merge_totals(found, one)
        return found

    def report(self, step: int, earlier: Totals | None = None) -> Totals:
        """Write what was bounded since the last report, as events and warnings of rank 0, and count from 0 again.

        Args:
            earlier: counts that are reported, too.

        Returns:
            The counts, the same on all ranks.

        Collective: all ranks of the world.
        """
        totals = merge_totals(earlier or {}, self.totals())
        self.table.zero_()
        if self._dims.rank == 0:
            for place, rows in bound_rows(totals).items():
                self._events.emit_on_rank_0(EVENT_KIND, "statistics", step=step, where=place, submodules=rows)
            for text, fields in warnings_of(totals, self._specs):
                logger.warning("step %d: %s", step, text)
                self._events.emit_on_rank_0(EVENT_KIND, "warning", step=step, **fields)
        return totals

    def _in_grace(self, spike: HookSpec, step: int) -> bool:
        since = step - 1 if self.reset is None else self.reset.steps_since(step)
        return since < spike.grace_steps

    def _steps_taken(self, flat: Tensor) -> int:
        """The optimizer's step count for its bias correction."""
        inner = self._optimizer.optimizer
        state = inner.state.get(flat, {})
        if "step" in state:
            return int(state["step"])
        return next(
            int(group.get("step", 0)) for group in inner.param_groups if any(one is flat for one in group["params"])
        )


def add_counts(table: Tensor, more: Tensor) -> None:
    """Add counts, [parameters, columns], in place; of the largest ratios the larger is kept."""
    largest = torch.maximum(table[:, _RATIO], more[:, _RATIO])
    table += more
    table[:, _RATIO] = largest


Totals = dict[str, dict[str, list[float]]]
"""Counts by place (``PLACES``) and full name of the parameter: one number for each of ``COLUMNS``."""


def merge_totals(one: Totals, other: Totals) -> Totals:
    """The sum of both; of the largest ratios the larger."""
    merged: Totals = {place: {name: list(row) for name, row in rows.items()} for place, rows in one.items()}
    for place, rows in other.items():
        of_place = merged.setdefault(place, {})
        for name, row in rows.items():
            of_place[name] = _sum([of_place[name], row]) if name in of_place else list(row)
    return merged


def _sum(rows: Sequence[Sequence[float]]) -> list[float]:
    total = [sum(column) for column in zip(*rows, strict=True)]
    total[_RATIO] = max(row[_RATIO] for row in rows)
    return total


def _by_submodule(rows: dict[str, list[float]]) -> dict[str, list[float]]:
    grouped: dict[str, list[list[float]]] = {}
    for name, row in rows.items():
        grouped.setdefault(name.rpartition(".")[0], []).append(row)
    return {fqn: _sum(of_it) for fqn, of_it in grouped.items()}


def _shares(row: Sequence[float]) -> dict[str, float]:
    one = dict(zip(COLUMNS, row, strict=True))
    return {
        "elements": one["elements"],
        "share": (one["by_absolute"] + one["by_spike"]) / one["elements"],
        "removed_share": one["removed"] / one["mass"] if one["mass"] else 0.0,
        "largest_ratio": one["largest_ratio"],
        "nan": one["nan"],
        "inf": one["inf"],
    }


def bound_rows(totals: Totals) -> dict[str, list[dict[str, Any]]]:
    """For each place, a row for each submodule in the order of the model.

    Columns: elements seen, summed over steps; share of them that was bounded; share of the mass (sum of magnitudes)
    that was removed; largest g^2 / V; numbers of NaN and Inf.
    """
    return {
        place: [
            {"submodule": fqn, **_shares(row)}
            for fqn, row in sorted(_by_submodule(rows).items(), key=lambda one: _in_order(one[0]))
        ]
        for place, rows in totals.items()
        if rows
    }


def _in_order(fqn: str) -> list[tuple[int, int, str]]:
    """Numbers of layers as numbers, whatever comes before and after them."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in fqn.split(".")]


def metrics_of(totals: Totals, specs: Sequence[HookSpec]) -> dict[str, float]:
    """Shares over the parameters that some entry bounds, at its places; NaN and Inf before the norm."""
    rows = [
        row
        for place, of_place in totals.items()
        for name, row in of_place.items()
        if bound_rule(name, specs, place) != BoundRule()
    ]
    seen = [row for row in totals.get(BEFORE_NORM, {}).values()]
    found = {}
    if rows:
        shares = _shares(_sum(rows))
        found = {f"bounds/{name}": shares[name] for name in ("share", "removed_share", "largest_ratio")}
    if seen:
        shares = _shares(_sum(seen))
        found["bounds/non_finite"] = shares["nan"] + shares["inf"]
    return found


def warnings_of(totals: Totals, specs: Sequence[HookSpec]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Shares above a bound's ``warn_share``, each as a sentence and as the fields of an event."""
    for number, spec in enumerate(specs):
        if spec.warn_share is None:
            continue
        column = COLUMNS.index(f"by_{spec.hook.removesuffix('_aware')}")
        fitting = {
            name: row
            for name, row in totals.get(spec.where, {}).items()
            if any(
                one is spec
                for one in (bound_rule(name, specs, spec.where).absolute, bound_rule(name, specs, spec.where).spike)
            )
        }
        for fqn, row in _by_submodule(fitting).items():
            share = row[column] / row[-1]
            if share > spec.warn_share:
                text = (
                    f"optimizer_hooks.{number} ({spec.hook}) bounded {share:.3%} of the elements of {fqn} since the "
                    f"last report, warn_share is {spec.warn_share:.3%}"
                )
                yield text, {"entry": number, "submodule": fqn, "share": share, "warn_share": spec.warn_share}
