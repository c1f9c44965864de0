"""Gradient bounds in a run: points of a step at which they are applied, agreement of all ranks, and reports."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megasdc.common.errors import ConfigError, NonFiniteError
from megasdc.config.hooks import AFTER_NORM, FILE, LOCAL, MOMENTUM_RESET, HookSpec
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.submodules import list_submodules
from megasdc.optim.bounds import (
    LARGEST_NORM,
    ClipFactors,
    MomentumReset,
    RateWarmup,
    ShardBounds,
    Totals,
    bound_rows,
    clip_factor,
    fits,
    gather_totals,
    merge_totals,
    metrics_of,
    warnings_of,
)
from megasdc.optim.hooks import GradientHook, GradientPart, load_hook
from megasdc.optim.zero1 import differ, owned_fragments
from megasdc.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)

EVENT_KIND = "bounds"
TIED_NAME = "0.word_embeddings.weight"
"""Name of a tied parameter on every stage."""


class GradientBounds(Hook):
    """Runs the entries of `optimizer_hooks`; the last hook that changes gradients before the optimizer.

    Args:
        interval: number of steps between reports.
        writer: writer of metrics on rank 0; None on other ranks.

    Raises:
        ConfigError: a file with a hook cannot be used.
    """

    saved_as = "GradientBounds"

    def __init__(self, specs: Sequence[HookSpec], run: Run, interval: int, writer: MetricsWriter | None) -> None:
        engine = run.engine
        self._run, self._specs, self._interval, self._writer = run, specs, interval, writer
        self._dims = engine.dims
        self._inner = engine.optimizer.optimizer
        self._reset = momentum_reset_of(specs)
        names = stage_parameter_names(engine)
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._bounds = ShardBounds(engine.optimizer, names, specs, self._reset, self._dims)
        self._files = self._load_files()
        self._warmup = RateWarmup(self._inner) if self._reset is not None else None
        self._carried: Totals = {}
        self._skipped: str | None = None
        self._copies_told = False
        if self._bounds.acts(AFTER_NORM):
            self._inner.register_step_pre_hook(lambda inner, *_: self._bounds.bound_clipped(inner, engine.step_number))

    # --- in a step ----------------------------------------------------------------------------------------------

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Bound this rank's own gradients."""
        if self._bounds.acts(LOCAL):
            self._bounds.bound_local(engine.step_number, _scale(engine))

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Bound the shards, agree on norm and skip, reset the moments when due.

        Collective: all ranks of the world; one reduction of a few numbers.
        Sync: waits for the device, in place of DeepSpeed's own read of the norm.
        """
        step, scale = engine.step_number, _scale(engine)
        if self._reset is not None and self._warmup is not None:
            self._warmup.factor = self._reset.rate_factor(step)
            if self._reset.is_due(step):
                self._reset.reset(self._inner)
                for clips in self._bounds.clips.values():
                    clips.clear()
                self._tell("reset", step, interval=self._reset.interval)
        failure = self._apply_files(engine, step, scale)
        seen = self._bounds.bound_reduced(step, scale)
        slots = torch.zeros(self._dims.tensor, len(seen.copies), dtype=torch.float64, device=engine.device)
        slots[self._dims.tp_rank] = seen.copies
        failed = torch.tensor(float(failure is not None), dtype=torch.float64, device=engine.device)
        sums = torch.cat([torch.stack([seen.squares, seen.skip, seen.halt, failed]), slots.flatten()])
        dist.all_reduce(sums)
        found = sums.cpu()
        squares, skip, halt, failures = found[:4].tolist()
        copies = found[4:].view(slots.shape).tolist()
        if failures:
            raise ConfigError([text for text in gather_objects(failure, self._run.host_group) if text is not None])
        norm = math.sqrt(squares)
        if skip or halt:
            self._skipped = self._explain(step, halted=bool(halt))
            if halt:
                raise NonFiniteError(
                    f"step {step} is not committed: {self._skipped}; the bound that fits it has non_finite "
                    '"halt". Look for the cause with sdc.always_on.finite, or use another policy'
                )
        elif norm > LARGEST_NORM:
            self._skipped = f"the norm of the gradient is {norm:.3g}, more than fp32 holds"
        elif differ([bits for _, *bits in copies]):
            self._tell_copies(step, [math.sqrt(one) for one, *_ in copies])
        own = bool(self._files) or self._bounds.changes(step)
        device_norm = torch.tensor(norm, dtype=torch.float64, device=engine.device) if own else None
        engine.step_control.decide(device_norm, self._skipped is not None)

    def _load_files(self) -> dict[str, tuple[HookSpec, GradientHook]]:
        """Hooks from files, by their names in checkpoints.

        Collective: all ranks of the world, so that a file that one rank cannot use is an error on all.
        """
        found: dict[str, tuple[HookSpec, GradientHook]] = {}
        problem = None
        for place, spec in enumerate(self._specs):
            if spec.hook != FILE or spec.path is None or spec.name is None:
                continue
            called = f"{spec.name} of {spec.path}"
            count = sum(one.startswith(called) for one in found)
            try:
                hook = load_hook(spec.path, spec.name, spec.settings, f"megasdc.optimizer_hooks.{place}")
                found[f"{called}, {count + 1}" if count else called] = spec, hook
            except ConfigError as error:
                problem = f"rank {self._dims.rank}: {error.problems[0]}"
                break
        if any(spec.hook == FILE for spec in self._specs):
            problems = [one for one in gather_objects(problem, self._run.host_group) if one is not None]
            if problems:
                raise ConfigError(problems[0])
        return found

    def _apply_files(self, engine: TrainingEngine, step: int, scale: float) -> str | None:
        """Call the hooks from files; returns a failure as a sentence, or None."""
        for fragment in owned_fragments(engine.optimizer) if self._files else ():
            if fragment.gradient is None:
                continue  # the pass that follows raises an error
            name = self._names[id(fragment.parameter)]
            moment = fragment.states(engine.optimizer).get("exp_avg_sq")
            part = GradientPart(name, fragment.gradient, moment, step, scale, fragment.offset)
            for called, (spec, hook) in self._files.items():
                if not fits(name, spec.parameters):
                    continue
                try:
                    hook.apply(part)
                except Exception as error:  # any error of the user's class: returned, so that all ranks end together
                    place = f"rank {self._dims.rank}, step {step}, {name}"
                    logger.exception("hook %s failed", called)
                    return f"hook {called} failed at {place}: {type(error).__name__}: {error}"
        return None

    def _explain(self, step: int, *, halted: bool) -> str:
        """Sentence on the place of NaN or Inf; writes an event on every rank that has some.

        Collective: all ranks of the world.
        """
        own = self._bounds.first_non_finite()
        found = [(rank, one) for rank, one in enumerate(gather_objects(own, self._run.host_group)) if one is not None]
        if own is not None:
            where, parameter, nan, inf = own
            action = "halt" if halted else "skip_step"
            fields: dict[str, Any] = {"where": where, "parameter": parameter, "nan": nan, "inf": inf, "action": action}
            self._run.events.emit(EVENT_KIND, "non_finite", step=step, **fields)
        rank, (where, parameter, nan, inf) = min(found, key=lambda one: one[1][0] != LOCAL)
        others = sum(one[0] == where for _, one in found) - 1
        more = f", and on {others} more ranks" if others else ""
        whose = f"as rank {rank} accumulated it" if where == LOCAL else f"in the shard of rank {rank}"
        return f"the gradient of {parameter} has {nan} NaN and {inf} Inf {whose}{more}"

    def _tell_copies(self, step: int, norms: list[float]) -> None:
        self._tell("copies_differ", step, norms=norms)
        first, self._copies_told = not self._copies_told, True
        if self._dims.rank == 0 and first:
            logger.warning(
                "step %d: gradients of parameters that every tensor rank holds differ between tensor ranks (norms %s); "
                "their copies drift apart from now on. Compare them with sdc.always_on.parameters",
                step,
                ", ".join(f"{one:.6g}" for one in norms),
            )

    def _tell(self, name: str, step: int, **fields: Any) -> None:
        if self._dims.rank == 0:
            self._run.events.emit(EVENT_KIND, name, step=step, **fields)

    # --- between steps ------------------------------------------------------------------------------------------

    def before_step(self, run: Run) -> None:
        """Clear the skip reason of the previous step."""
        run.progress.skip_place = None

    def after_step(self, run: Run, result: StepResult) -> None:
        """Set the reason of a skipped step; report when due.

        Collective: all ranks of the world, at a report.
        """
        if self._skipped is not None:
            run.progress.skip_place = run.progress.skip_place or self._skipped
            self._skipped = None
        if not result.skipped:
            self._bounds.count_clip(clip_factor(result.grad_norm, float(run.engine.optimizer.clip_grad)))
        if run.step % self._interval == 0:
            self._report(run)

    def on_end(self, run: Run) -> None:
        """Report the steps since the last report; after a resume they are reported again with later ones.

        Collective: all ranks of the world.
        """
        if run.step % self._interval:
            self._report(run)

    def _report(self, run: Run) -> None:
        totals = self._totals()
        self._bounds.table.zero_()
        self._carried, self._copies_told = {}, False
        if self._dims.rank != 0:
            return
        for place, rows in bound_rows(totals).items():
            run.events.emit(EVENT_KIND, "statistics", step=run.step, where=place, submodules=rows)
        for text, fields in warnings_of(totals, self._specs):
            logger.warning("step %d: %s", run.step, text)
            run.events.emit(EVENT_KIND, "warning", step=run.step, **fields)
        if self._writer is not None:
            factor = {} if self._warmup is None else {"bounds/learning_rate_factor": self._warmup.factor}
            self._writer.write(run.step, {**metrics_of(totals, self._specs), **factor})

    def _totals(self) -> Totals:
        data_group = self._run.engine.mpu.get_data_parallel_group()
        return merge_totals(self._carried, gather_totals(self._bounds, self._dims, data_group, self._run.host_group))

    def state_dict(self) -> dict[str, Any]:
        """Counts since the last report, mean clip factors, and the states of hooks from files.

        Collective: all ranks of the world.
        """
        return {
            "totals": self._totals(),
            "clips": [[one.beta, one.squares, one.weight] for one in self._bounds.clips.values()],
            "files": {name: hook.state_dict() for name, (_, hook) in self._files.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts, the clip factors and the states of hooks from files."""
        self._carried = state["totals"]
        for beta, squares, weight in state.get("clips", ()):  # a checkpoint of an earlier version has none
            if beta in self._bounds.clips:
                self._bounds.clips[beta] = ClipFactors(beta, squares, weight)
        for name, own in state["files"].items():
            if name in self._files:
                self._files[name][1].load_state_dict(own)
            elif self._dims.rank == 0:
                self._run.events.emit(EVENT_KIND, "state_dropped", hook=name)
                logger.warning("the checkpoint has a state of hook %s, which is not configured; it is dropped", name)


def stage_parameter_names(engine: TrainingEngine) -> dict[Any, str]:
    """Full name of every parameter of the stage, the same for both copies of a tied one."""
    return {
        parameter: TIED_NAME if getattr(parameter, "ds_pipe_replicated", False) else f"{one.fqn}.{slot}"
        for one in list_submodules(engine.module)
        for slot, parameter in one.parameters.items()
    }


def momentum_reset_of(specs: Sequence[HookSpec]) -> MomentumReset | None:
    """Schedule of resets of moments among the hooks; None: they are never reset."""
    for spec in specs:
        if spec.hook == MOMENTUM_RESET:
            return MomentumReset(spec.interval, spec.warmup_steps, spec.warmup_start, spec.restart_bias_correction)
    return None


def _scale(engine: TrainingEngine) -> float:
    """Loss scale of the stored gradients."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
