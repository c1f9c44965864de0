"""A running job and its hooks: ``Run`` holds the parts and the progress, hooks are called at the points of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megasdc.data.loader import MicroBatchLoader
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.events import EventLog
from megasdc.parallel.collectives import Field, StepAgreement
from megasdc.parallel.dims import ParallelDims


def _nothing(_phase: str) -> None:
    """Default of ``Run.enter``: phases are not recorded."""


@dataclass
class RunProgress:
    """Progress of a run.

    Args:
        steps: number of steps of the whole run.
        step: number of the last finished step; 0: none.
        tokens: tokens used so far.
        samples: samples consumed so far, over all replicas.
        uncounted_samples: samples of the stream that replicas are past, besides ``samples``: those that were given up;
            negative where a run has begun the stream again.
        skipped_steps: steps that the optimizer skipped so far.
        finite_step: last step that the optimizer took with a finite loss and gradient norm; 0: none.
        skip_place: sentence that says where values of the last step became NaN or Inf; None: not searched, or all
            finite.
        paused_s: seconds of evaluations, saves and golden checks, which are not step time.
    """

    steps: int
    step: int = 0
    tokens: int = 0
    samples: int = 0
    uncounted_samples: int = 0
    skipped_steps: int = 0
    finite_step: int = 0
    skip_place: str | None = None
    paused_s: float = 0.0


@dataclass
class RunEnd:
    """End of a run after this step, if it has a reason to end.

    Args:
        reason: why the run ends after this step, the same on all ranks; None: it goes on.
        error: exception that is raised at the end, once the run is saved; None: it has ended well.
        must_stop_soon: whether the reason is a signal or a time limit, after which processes may be killed.
        waits_for_others: whether other replicas have still to say what the weights after this step are.
        results: fields of the end event.
    """

    reason: str | None = None
    error: Exception | None = None
    must_stop_soon: bool = False
    waits_for_others: bool = False
    results: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """The parts of a running job, its progress and its end.

    Args:
        loader: this replica's training samples, with a saved position.
        batches: iterator over the loader's micro-batches, as the engine reads it.
        events: this rank's event log.
        host_group: a gloo group of all ranks, for decisions that must not wait for a device.
        initial_dims: place of this rank when the launch began; None: the same as now, no replica was left out since.
        enter: called with the name of a phase (``megasdc.ops.health.phases``) that begins between steps.
        skipped_checkpoint_steps: steps whose checkpoints lie in the run's folder but were not resumed from and are not
            of its past.
    """

    folder: Path
    dims: ParallelDims
    engine: TrainingEngine
    loader: MicroBatchLoader
    batches: Iterator[Any]
    events: EventLog
    host_group: Any
    progress: RunProgress
    end: RunEnd = field(default_factory=RunEnd)
    initial_dims: ParallelDims | None = None
    enter: Callable[[str], None] = _nothing
    skipped_checkpoint_steps: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.engine.agreement = StepAgreement(self.host_group)

    @property
    def step(self) -> int:
        """Number of the last finished step."""
        return self.progress.step

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.progress.steps

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
        return self.step >= self.steps or self.end.reason is not None


class Slot(StrEnum):
    """Places in the order of a run's hooks, first to last; ``megasdc.features`` says which hook has which."""

    PRESENCE = "presence"
    TIMES = "times"
    CHECKS = "checks"
    FAULTS = "faults"
    RESULTS = "results"
    GRADIENTS = "gradients"
    BOUNDS = "bounds"
    STOP = "stop"
    MEASURE = "measure"
    KEEP = "keep"
    END = "end"


PURPOSES = {
    Slot.PRESENCE: "what this rank is doing is told, and whether the folder is still its own, before anything else",
    Slot.TIMES: "how much a step computes, and how long it takes; before injected delays, and so including them",
    Slot.CHECKS: "what it computes; local gradients are read before faults are injected into them",
    Slot.FAULTS: "faults are injected into gradients, optimizer states and processes",
    Slot.RESULTS: "results of submodules and reduced gradients are read, with whatever faults have made of them",
    Slot.GRADIENTS: "gradients are changed",
    Slot.BOUNDS: "gradients are bounded, the last change of them; then what the optimizer will use is read",
    Slot.STOP: "whether to stop: this run, then the replicas of a study",
    Slot.MEASURE: "what is measured and reported",
    Slot.KEEP: "what is saved",
    Slot.END: "what may damage a checkpoint that is whole; then what one rank waits for alone",
}
"""Purpose of each slot."""


class Hook:
    """Base class of hooks; each method does nothing unless overridden.

    Hooks are called on every rank, in the order of the engine's list, which is the one of
    ``megasdc.features``. They may call collectives, except in ``close``. A hook calls no other hook. On a rank
    that fails, no further hook is called but for ``close``; where all ranks leave replicas out, ``before_isolation``.
    """

    fields: Sequence[Field] = ()
    """Values that are reduced over all ranks in each step, the same fields on all ranks; known in ``after_step``."""
    saved_as: str = ""
    """Name of the hook's state in checkpoints, which stays when the class is renamed; empty: it has no state."""
    slot: Slot | str = Slot.MEASURE
    """Place of a hook of the user's own: after those of megasdc in that slot, in the order of the configuration."""
    in_replays: bool = False
    """Whether the calls around passes are made, too, in a replay or an extra micro-batch (``engine.is_replaying``)."""

    def __init_subclass__(cls) -> None:
        """Refuse a hook with a state and no name for it: the state would be lost at a resume, with nothing said."""
        super().__init_subclass__()
        if bool(cls.saved_as) != (cls.state_dict is not Hook.state_dict):
            raise TypeError(f"{cls.__name__}: a hook needs both state_dict and a name in saved_as, or neither")

    # --- between steps ------------------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Training is about to start, or to continue from a checkpoint."""

    def before_step(self, run: Run) -> None:
        """A step is about to start."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """A step has ended; ``run`` includes it already."""

    def on_end(self, run: Run) -> None:
        """The last step has ended without an error."""

    def before_isolation(self, run: Run) -> None:
        """The run is about to go on in these processes without some of its replicas; only ``close`` follows."""

    def state_dict(self) -> dict[str, Any]:
        """State to restore after a resume, in plain values, the same on all ranks; empty: nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned at the checkpoint."""

    def close(self) -> None:
        """Release resources: files, signal handlers. Called once, also after an error."""

    # --- in a step ----------------------------------------------------------------------------------------------

    def before_micro_batches(self, engine: TrainingEngine) -> None:
        """A step begins."""

    def before_start(self, engine: TrainingEngine, micro_batch: int, time_left_s: float) -> None:
        """This replica is about to decide whether to start a micro-batch; called on the rank that decides.

        Args:
            engine: the engine of the first stage's first tensor rank.
            micro_batch: number of the next micro-batch; the first of a step is 0.
            time_left_s: seconds until the replica must not start it any more; infinite without a limit.
        """

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """A micro-batch's forward pass on this stage is about to start; the first of a step is 0."""

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """The forward pass has been issued."""

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """A micro-batch's backward pass on this stage is about to start."""

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """The backward pass has been issued."""

    def while_waiting(self, engine: TrainingEngine) -> None:
        """This stage of a pipeline waits for others, so that work of its own takes no time here.

        Called once or twice in a step, never with one stage; a hook does in ``after_micro_batches`` what it could not.
        """

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """All micro-batches have run; no gradient has been mixed with that of another stage or replica yet.

        A hook may call ``engine.recompute_step`` only here; it may call ``engine.recompute_micro_batch`` here and in
        ``after_optimizer_step`` of a skipped step.
        """

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Gradients of all micro-batches are accumulated; they are about to be summed over replicas."""

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Gradients are reduced; the optimizer has not read them yet."""

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """The optimizer has stepped, or skipped the step (``engine.is_skipped``); parameters are gathered."""
