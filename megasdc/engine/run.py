"""The parts of a running job, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.data.loader import MicroBatchLoader
from megasdc.engine.engine import TrainingEngine
from megasdc.events import EventLog
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.step_agreement import StepAgreement


def _nothing(_phase: str) -> None:
    """Nobody records phases."""


@dataclass
class Run:
    """The parts of a running job, and its progress.

    Args:
        loader: this replica's training samples, with a saved position.
        batches: the loader as the engine reads it.
        events: this rank's event log.
        steps: steps of the whole run.
        host_group: a gloo group of all ranks, for decisions that must not wait for a device.
        step: last finished step.
        tokens: tokens used so far.
        samples: samples consumed so far, all replicas.
        uncounted_samples: samples of the stream that replicas are past, besides ``samples``: those that were given up;
            negative where a run has begun the stream again.
        skipped_steps: steps that the optimizer skipped so far.
        finite_step: last step that it took with a finite loss and gradient norm; 0: none.
        skip_place: where values of the last step became NaN or Inf, as a sentence; None: not searched, or all finite.
        stop_reason: None, or why the run ends after this step; the same on all ranks.
        stop_error: raised after that as the run's end, once it is saved; None: it has ended well.
        must_stop_soon: whether that is a signal or a time limit, after which processes may be killed.
        paused_s: seconds of evaluations, saves and golden checks, which are not step time.
        results: fields of the end event.
        enter: called with the name of a phase (``megasdc.ops.health.phases``) that begins between steps.
        skipped_checkpoint_steps: steps whose checkpoints lie in the run's folder but were not resumed from and are not
        of its past.
        initial_dims: place of this rank when the launch began; None: as now, no replica was left out since.
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
    uncounted_samples: int = 0
    skipped_steps: int = 0
    finite_step: int = 0
    skip_place: str | None = None
    stop_reason: str | None = None
    stop_error: Exception | None = None
    must_stop_soon: bool = False
    paused_s: float = 0.0
    results: dict[str, Any] = field(default_factory=dict)
    enter: Callable[[str], None] = _nothing
    skipped_checkpoint_steps: set[int] = field(default_factory=set)
    initial_dims: ParallelDims | None = None

    def __post_init__(self) -> None:
        self.engine.agreement = StepAgreement(self.host_group)

    @property
    def hooks(self) -> list[Any]:
        """The hooks (``megasdc.engine.hooks.Hook``) in the order in which they are called, kept by the engine."""
        return self.engine.hooks

    @hooks.setter
    def hooks(self, hooks: list[Any]) -> None:
        self.engine.hooks = hooks

    @property
    def launch_dims(self) -> ParallelDims:
        """Place of this rank when the launch began."""
        return self.initial_dims or self.dims

    @property
    def stream_end(self) -> int:
        """Position in the training stream after the samples that replicas as far as this one are past."""
        deal, loader = self.engine.deal, self.loader
        if deal is None:
            return loader.stream_end
        order, size = loader.position.order, loader.micro_batch_size
        end = deal.end(self.step, loader.dp_rank, loader.position.consumed // size) * size
        return max(order.start, order[end - 1] + 1 if end > 0 else 0)

    @property
    def is_last_step(self) -> bool:
        """Whether no step follows the last finished one."""
        return self.step >= self.steps or self.stop_reason is not None
