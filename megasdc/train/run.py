"""The parts of a run, the hooks between steps, and the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.data.loader import MicroBatchLoader
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.events import EventLog
from megasdc.parallel.dims import ParallelDims


@dataclass
class Run:
    """The parts of a running job, and its progress.

    Args:
        folder: the run folder.
        dims: layout and place of this rank.
        engine: runs one step.
        loader: this replica's training samples, with a saved position.
        batches: the loader as the engine reads it.
        events: this rank's event log.
        steps: steps of the whole run.
        host_group: a gloo group of all ranks, for decisions that must not wait for a device.
        step: last finished step.
        tokens: tokens used so far.
        samples: samples consumed so far, all replicas.
        skipped_steps: steps that the optimizer skipped so far.
        skip_place: where values of the last step became NaN or Inf, as a sentence; None: not searched, or all finite.
        stop_reason: None, or why the run ends after this step; the same on all ranks.
        hooks: called between steps, in this order.
        paused_s: seconds of evaluations, saves and golden checks, which are not step time.
        results: fields of the end event.
        passed_over: steps whose checkpoints lie in the run's folder but were not resumed from and are not of its past.
    """

    folder: Path
    dims: ParallelDims
    engine: TrainingEngine
    loader: MicroBatchLoader
    batches: Iterator[Any]
    events: EventLog
    steps: int
    host_group: Any
    step: int = 0
    tokens: int = 0
    samples: int = 0
    skipped_steps: int = 0
    skip_place: str | None = None
    stop_reason: str | None = None
    hooks: list[StepHook] = field(default_factory=list)
    paused_s: float = 0.0
    results: dict[str, Any] = field(default_factory=dict)
    passed_over: set[int] = field(default_factory=set)

    @property
    def is_last_step(self) -> bool:
        """Whether no step follows the last finished one."""
        return self.step >= self.steps or self.stop_reason is not None


class StepHook:
    """Base class of hooks between steps; each method does nothing unless overridden.

    Hooks are called on every rank, in the order of the one list in ``megasdc.train.build_hooks``, and may call
    collectives, except in ``on_error`` and ``close``. A hook calls no other hook.
    """

    def on_start(self, run: Run) -> None:
        """Training is about to start, or to continue from a checkpoint."""

    def before_step(self, run: Run) -> None:
        """A step is about to start."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """A step has ended; ``run`` includes it already."""

    def on_end(self, run: Run) -> None:
        """The last step has ended without an error."""

    def state_dict(self) -> dict[str, Any]:
        """State to restore after a resume, in plain values, the same on all ranks; empty: nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned at the checkpoint."""

    def on_error(self, run: Run, error: BaseException) -> None:
        """React to a failure of this rank; no collective may be called."""

    def close(self) -> None:
        """Release resources: files, signal handlers. Called once, also after an error."""


def train(run: Run) -> None:
    """Run steps until the run is complete or has a reason to stop.

    Args:
        run: the run with its hooks, at the step from which it continues.

    Collective: all ranks of the world.
    """
    hooks = run.hooks
    try:
        for hook in hooks:
            hook.on_start(run)
        while not run.is_last_step:
            take_step(run)
        for hook in hooks:
            hook.on_end(run)
    except BaseException as error:
        for hook in hooks:
            hook.on_error(run, error)
        raise
    finally:
        for hook in hooks:
            hook.close()


def take_step(run: Run) -> None:
    """Run one step, with all hooks before and after it.

    Args:
        run: the run, started.

    Collective: all ranks of the world.
    """
    for hook in run.hooks:
        hook.before_step(run)
    result = run.engine.train_step(run.batches)
    run.step = result.step
    run.tokens += result.tokens
    run.samples += result.micro_batches * run.engine.micro_batch_size
    run.skipped_steps += result.skipped is not None
    for hook in run.hooks:
        hook.after_step(run, result)
