"""Bounds of gradients in a guarded training: on the shards of ZeRO 1 and 2, before the norm of the whole is taken."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from megasdc.attached.training import Protection, Training
from megasdc.common.errors import ConfigError, NonFiniteError
from megasdc.config.hooks import BEFORE_NORM, BOUNDS, HookSpec, bound_problems, gradient_hook_problems
from megasdc.optim.bounds import ShardBounds
from megasdc.optim.zero1 import StepControl
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

    name = "bounds of gradients"

    def __init__(self, training: Training) -> None:
        engine, specs = training.engine, training.settings.optimizer_hooks
        self._engine, self._interval, self._events = engine, training.settings.logging.interval, training.events
        names = {one: name for name, one in engine.module.named_parameters() if one.requires_grad}
        self._bounds = ShardBounds(engine, names, specs, training.dims, training.host_group, training.events)
        self._control = StepControl(engine.optimizer, engine.data_parallel_group)

    def close(self) -> None:
        """Give the optimizer back its own norm and skip."""
        self._control.close()

    def before_step(self, step: int) -> Iterable[Finding]:
        """Bound this rank's shards, and agree on norm and skip.

        Raises:
            NonFiniteExit: on all ranks, for NaN or Inf whose policy is to halt.

        Collective: all ranks of the world; one reduction of a few numbers.
        Sync: waits for the device, in place of DeepSpeed's own read of the norm.
        """
        bounded = self._bounds.bound_reduced(step)
        reason = self._bounds.decide(step, bounded, self._control)
        if bounded.halt:
            raise NonFiniteExit(f"step {step} is not taken: {reason}, and the bound that fits it has non_finite halt")
        if reason is not None:
            self._events.emit_on_rank_0("skip", "optimizer_step", step=step, reason=reason)
            if self._events.rank == 0:
                logger.warning("step %d is skipped: %s", step, reason)
        return ()

    def after_step(self, step: int) -> None:
        """Count the clip of a step that was taken, and report when due.

        Collective: all ranks of the world, at a report.
        """
        if not self._engine.optimizer.overflow:
            self._bounds.count_clip(float(self._engine.get_global_grad_norm()))
        if step % self._interval == 0:
            self._bounds.report(step)
