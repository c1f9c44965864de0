"""Hooks: the points of a step at which a feature is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasdc.engine.engine import TrainingEngine


class EngineHook:
    """Base class of hooks; each method does nothing unless overridden.

    Hooks are called in the order of the engine's list. A hook calls no other hook. On a rank that fails, no further
    hook is called.
    """

    def before_micro_batches(self, engine: TrainingEngine) -> None:
        """A step begins."""

    def before_start(self, engine: TrainingEngine, micro_batch: int, time_left_s: float) -> None:
        """This replica is about to decide whether to start a micro-batch; called on the rank that decides.

        Args:
            engine: of the first stage's first tensor rank.
            micro_batch: the next one; the first of a step is 0.
            time_left_s: until the replica must not start it any more; infinite without a limit.
        """

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """A micro-batch's forward pass on this stage is about to start; the first of a step is 0."""

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """The forward pass has been issued."""

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """A micro-batch's backward pass on this stage is about to start."""

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """The backward pass has been issued."""

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """All micro-batches have run; no gradient has been mixed with that of another stage or replica yet.

        A hook may call ``engine.compute_again`` only here; it may call ``engine.rehearse`` here and in
        ``after_optimizer_step`` of a skipped step.
        """

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Gradients of all micro-batches are accumulated; they are about to be summed over replicas."""

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Gradients are reduced; the optimizer has not read them yet."""

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """The optimizer has stepped, or skipped the step (``engine.is_skipped``); parameters are gathered."""
