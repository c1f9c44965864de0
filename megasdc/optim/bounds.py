"""Gradient bounds on the shards that a rank owns: the rules of all parameters in one pass, counted on the device.

Bounds are applied before the norm by default; else one outlier in the norm would make clipping scale all else to 0.

Source: Pei, Lausen, Karypis, IEEE Micro 2025, 10.1109/MM.2025.3642709, eq. 1; Huang et al., SPAM, arXiv 2501.06842.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.config.sections.optimizer_hooks import AFTER_NORM, BEFORE_NORM, BOUNDS, HALT, LOCAL, SKIP_STEP, HookSpec
from megasdc.optim.bound_rules import BoundRule, bound_rule, limits_at, may_act
from megasdc.optim.clip_factors import ClipFactors
from megasdc.optim.copies import shard_checksum
from megasdc.optim.momentum_reset import MomentumReset
from megasdc.optim.zero1 import accumulated_gradient, counts_here, is_copied, owned_fragments
from megasdc.parallel.dims import ParallelDims
from megasdc.tensors.bound import bound_
from megasdc.tensors.bound_limits import SUMS, ElementLimits

PLACES = (LOCAL, BEFORE_NORM, AFTER_NORM)
COLUMNS = (*SUMS, "elements")
"""Counts of each parameter: ``megasdc.tensors.bound_limits.SUMS``, and the number of elements seen."""
_SQUARES, _NAN, _INF, _RATIO = (SUMS.index(name) for name in ("squares", "nan", "inf", "largest_ratio"))


@dataclass(frozen=True)
class Seen:
    """Results of a pass over the gradients of a step on this rank; on the device.

    Args:
        squares: sum over the elements that this rank counts, after bounding, 0-d, fp64.
        copies: of the parameters that every tensor rank holds, all its shards: squares, and the digest of their bits,
            [3], fp64; zeros where there is one tensor rank.
        skip: number of NaN and Inf elements whose policy skips the step, 0-d, fp64.
        halt: number of those whose policy ends the run, 0-d, fp64.
    """

    squares: Tensor
    copies: Tensor
    skip: Tensor
    halt: Tensor


class ShardBounds:
    """Bounds the gradients that a rank owns.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer.
        names: full name of each parameter of the stage; a tied copy has the name of its original.
        specs: the entries of the configuration; those that are not bounds are ignored.
        reset: resets of the moments; None: there are none.
    """

    def __init__(
        self,
        optimizer: Any,
        names: Mapping[nn.Parameter, str],
        specs: Sequence[HookSpec],
        reset: MomentumReset | None,
        dims: ParallelDims,
    ) -> None:
        self._optimizer = optimizer
        self._specs = [spec for spec in specs if spec.hook in BOUNDS and spec.where == BEFORE_NORM]
        self._reset = reset
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
        return any(may_act(spec, step) for spec in self._specs)

    @torch.no_grad()
    def bound_local(self, step: int, scale: float) -> None:
        """Bound this rank's own accumulated gradients, before they are averaged.

        Args:
            step: optimizer step, first is 1.
            scale: loss scale.

        Sync: none.
        """
        sums = self._begin()
        for place, parameter in enumerate(self._parameters):
            rule = self.rules[LOCAL][place]
            gradient = accumulated_gradient(self._optimizer, parameter).view(-1)
            bound_(gradient, None, limits_at(rule, step, scale), sums[place])
        self._end(LOCAL, sums)
        self.local_pass = sums

    @torch.no_grad()
    def bound_reduced(self, step: int, scale: float) -> Seen:
        """Bound the owned shards of the reduced gradients in place, before their norm is taken.

        Args:
            step: optimizer step, first is 1.
            scale: loss scale.

        Returns:
            The pass's results, with NaN and Inf of the local gradients included.

        Raises:
            RuntimeError: a parameter has no reduced gradient.

        Sync: none, except with ``bias_corrected`` and PyTorch's fused AdamW on a GPU, whose step count is on the GPU:
        once for each of its groups.
        """
        sums = self._begin()
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
        copies = torch.cat([of_copies, shard_checksum(copied, sums.device)])
        return Seen((squares * self._counted).sum(), copies, skipping.sum(), halting.sum())

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

    def first_non_finite(self) -> tuple[str, str, int, int] | None:
        """Of this step: (place, parameter, NaN, Inf) of the first parameter that had any; None: all were finite.

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

    def count_clip(self, factor: float) -> None:
        """Count a step that the optimizer has taken, clipped by this factor."""
        for one in self.clips.values():
            one.add(factor)

    def _in_grace(self, spike: HookSpec, step: int) -> bool:
        since = step - 1 if self._reset is None else self._reset.steps_since(step)
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
