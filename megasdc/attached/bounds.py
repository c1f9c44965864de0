"""Bounds of gradients in a guarded training: on the shards of ZeRO 1 and 2, before the norm of the whole is taken."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megasdc.attached.training import Protection, Training
from megasdc.common.errors import ConfigError, NonFiniteError
from megasdc.config.hooks import BEFORE_NORM, BOUNDS, HookSpec, bound_problems, gradient_hook_problems
from megasdc.optim.bounds import LARGEST_NORM, ShardBounds, bound_rows, clip_factor, gather_totals, warnings_of
from megasdc.optim.zero1 import StepControl
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.finding import Finding

logger = logging.getLogger(__name__)


class NonFiniteExit(NonFiniteError, SystemExit):
    """NaN or Inf, whose policy ends a guarded training; where nobody catches it the process ends with its exit code."""

    @property
    def code(self) -> int:  # type: ignore[override]
        """Exit code of the process."""
        return self.exit_code


def check_bounds(specs: Sequence[HookSpec], engine: Any) -> None:
    """Refuse bounds that a guard cannot apply.

    Raises:
        ConfigError: some bounds cannot be applied; with every problem.
    """
    problems = [one.text for one in bound_problems(engine.config)] if specs else []
    for place, spec in enumerate(specs):
        path = f"optimizer_hooks.{place}"
        problems += [one.text for one in gradient_hook_problems(spec, path, engine.config)]
        if spec.hook not in BOUNDS:
            problems.append(f"{path}.hook: got {spec.hook!r}; allowed here: {', '.join(BOUNDS)}.")
        elif spec.where != BEFORE_NORM:
            problems.append(f"{path}.where: got {spec.where!r}; allowed here: {BEFORE_NORM}.")
    if specs and engine.zero_optimization_stage() not in (1, 2):
        problems.append("optimizer_hooks: got bounds with ZeRO 0; they act on shards of ZeRO 1 and 2.")
    if problems:
        raise ConfigError(problems)


class GuardBounds(Protection):
    """Part of a guard that bounds the gradients of each step; made after ``check_bounds``."""

    def __init__(self, training: Training) -> None:
        engine, specs, dims = training.engine, training.settings.optimizer_hooks, training.dims
        self._engine, self._specs, self._dims, self._group = engine, specs, dims, training.host_group
        self._interval, self._emit = training.settings.logging.interval, training.events.emit_on_rank_0
        names = {one: name for name, one in engine.module.named_parameters() if one.requires_grad}
        self._bounds = ShardBounds(engine.optimizer, names, specs, None, dims)
        self._control = StepControl(engine.optimizer, engine.data_parallel_group)

    def close(self) -> None:
        """Give the optimizer back its own norm and skip."""
        self._control.close()

    def before_step(self, step: int) -> Iterable[Finding]:
        """Bound this rank's shards, and agree on norm and skip.

        Raises:
            NonFiniteExit: on all ranks, for NaN or Inf whose policy is to halt.

        Collective: all ranks of the world; one reduction of three numbers.
        Sync: waits for the device, in place of DeepSpeed's own read of the norm.
        """
        seen = self._bounds.bound_reduced(step, self._scale)
        sums = torch.stack([seen.squares, seen.skip, seen.halt])
        dist.all_reduce(sums)
        squares, skip, halt = sums.tolist()
        norm = math.sqrt(squares)
        reason = self._explain() if skip or halt else None
        if halt:
            raise NonFiniteExit(f"step {step} is not taken: {reason}, and the bound that fits it has non_finite halt")
        if reason is None and norm > LARGEST_NORM:
            reason = f"the norm of the gradient is {norm:.3g}, more than fp32 holds"
        if reason is not None:
            self._emit("skip", "optimizer_step", step=step, reason=reason)
            if self._dims.rank == 0:
                logger.warning("step %d is skipped: %s", step, reason)
        changed = torch.tensor(norm, dtype=torch.float64, device=sums.device) if self._bounds.changes(step) else None
        self._control.decide(changed, reason is not None)
        return ()

    def after_step(self, step: int) -> None:
        """Count the clip of a step that was taken, and report when due.

        Collective: all ranks of the world, at a report.
        """
        optimizer = self._engine.optimizer
        if not optimizer.overflow:
            self._bounds.count_clip(clip_factor(float(self._engine.get_global_grad_norm()), float(optimizer.clip_grad)))
        if step % self._interval:
            return
        totals = gather_totals(self._bounds, self._dims, self._engine.data_parallel_group, self._group)
        self._bounds.table.zero_()
        for place, rows in bound_rows(totals).items():
            self._emit("bounds", "statistics", step=step, where=place, submodules=rows)
        for text, fields in warnings_of(totals, self._specs):
            if self._dims.rank == 0:
                logger.warning("step %d: %s", step, text)
            self._emit("bounds", "warning", step=step, **fields)

    @property
    def _scale(self) -> float:
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else 1.0

    def _explain(self) -> str:
        """Sentence on the place of NaN or Inf in the gradient; all ranks call it together."""
        found = enumerate(gather_objects(self._bounds.first_non_finite(), self._group))
        rank, (_, parameter, nan, inf) = next((rank, one) for rank, one in found if one is not None)
        return f"the gradient of {parameter} has {nan} NaN and {inf} Inf in the shard of rank {rank}"
