"""Gradient bounds in a run: points of a step at which they are applied, hooks from files, resets, and saved counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from megasdc.common.errors import ConfigError, NonFiniteError
from megasdc.config.hooks import AFTER_NORM, FILE, LOCAL, HookSpec
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.submodules import list_submodules
from megasdc.optim.bounds import (
    EVENT_KIND,
    ClipFactors,
    RateWarmup,
    ShardBounds,
    Totals,
    fits,
    merge_totals,
    metrics_of,
)
from megasdc.optim.hooks import GradientHook, GradientPart, load_hook
from megasdc.optim.zero1 import differ, loss_scale, owned_fragments
from megasdc.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)

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
        names = stage_parameter_names(engine)
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._bounds = ShardBounds(engine, names, specs, self._dims, run.host_group, run.events)
        self._files = self._load_files()
        self._warmup = RateWarmup(self._inner) if self._bounds.reset is not None else None
        self._carried: Totals = {}
        self._skipped: str | None = None
        self._copies_told = False
        if self._bounds.acts(AFTER_NORM):
            self._inner.register_step_pre_hook(lambda inner, *_: self._bounds.bound_clipped(inner, engine.step_number))

    # --- in a step ----------------------------------------------------------------------------------------------

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Bound this rank's own gradients."""
        if self._bounds.acts(LOCAL):
            self._bounds.bound_local(engine.step_number)

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Bound the shards, agree on norm and skip, reset the moments when due.

        Collective: all ranks of the world; one reduction of a few numbers.
        Sync: waits for the device, in place of DeepSpeed's own read of the norm.
        """
        step, reset = engine.step_number, self._bounds.reset
        if reset is not None and self._warmup is not None:
            self._warmup.factor = reset.rate_factor(step)
            if reset.is_due(step):
                reset.reset(self._inner)
                for clips in self._bounds.clips.values():
                    clips.clear()
                self._run.events.emit_on_rank_0(EVENT_KIND, "reset", step=step, interval=reset.interval)
        failure = self._apply_files(engine, step)
        bounded = self._bounds.bound_reduced(step, failed=failure is not None)
        if bounded.failed:
            raise ConfigError([text for text in gather_objects(failure, self._run.host_group) if text is not None])
        self._skipped = self._bounds.decide(step, bounded, engine.step_control, changed=bool(self._files))
        if bounded.halt:
            raise NonFiniteError(
                f"step {step} is not committed: {self._skipped}; the bound that fits it has non_finite "
                '"halt". Look for the cause with sdc.always_on.finite, or use another policy'
            )
        if self._skipped is None and differ([bits for _, *bits in bounded.copies]):
            self._warn_of_copies(step, [math.sqrt(one) for one, *_ in bounded.copies])

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

    def _apply_files(self, engine: TrainingEngine, step: int) -> str | None:
        """Call the hooks from files; returns a failure as a sentence, or None."""
        scale = loss_scale(engine)
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

    def _warn_of_copies(self, step: int, norms: list[float]) -> None:
        self._run.events.emit_on_rank_0(EVENT_KIND, "copies_differ", step=step, norms=norms)
        first, self._copies_told = not self._copies_told, True
        if self._dims.rank == 0 and first:
            logger.warning(
                "step %d: gradients of parameters that every tensor rank holds differ between tensor ranks (norms %s); "
                "their copies drift apart from now on. Compare them with sdc.always_on.parameters",
                step,
                ", ".join(f"{one:.6g}" for one in norms),
            )

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
            self._bounds.count_clip(result.grad_norm)
        if run.step % self._interval == 0:
            self._report(run)

    def on_end(self, run: Run) -> None:
        """Report the steps since the last report; after a resume they are reported again with later ones.

        Collective: all ranks of the world.
        """
        if run.step % self._interval:
            self._report(run)

    def _report(self, run: Run) -> None:
        totals = self._bounds.report(run.step, self._carried)
        self._carried, self._copies_told = {}, False
        if self._writer is not None:
            factor = {} if self._warmup is None else {"bounds/learning_rate_factor": self._warmup.factor}
            self._writer.write(run.step, {**metrics_of(totals, self._specs), **factor})

    def state_dict(self) -> dict[str, Any]:
        """Counts since the last report, mean clip factors, and the states of hooks from files.

        Collective: all ranks of the world.
        """
        return {
            "totals": merge_totals(self._carried, self._bounds.totals()),
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
                self._run.events.emit_on_rank_0(EVENT_KIND, "state_dropped", hook=name)
                logger.warning("the checkpoint has a state of hook %s, which is not configured; it is dropped", name)


def stage_parameter_names(engine: TrainingEngine) -> dict[Any, str]:
    """Full name of every parameter of the stage, the same for both copies of a tied one."""
    return {
        parameter: TIED_NAME if getattr(parameter, "ds_pipe_replicated", False) else f"{one.fqn}.{slot}"
        for one in list_submodules(engine.module)
        for slot, parameter in one.parameters.items()
    }
