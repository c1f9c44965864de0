"""Pipeline schedule of a stage whose replica may stop starting micro-batches in the middle of a step.

DeepSpeed's 1F1B order, slot by slot: before each forward slot the stage learns whether its replica starts the
micro-batch. Stage 0 asks the gate; a later stage receives the decision from the stage before, where the activation
would have been announced, so no rank waits for a message that is never sent. A started micro-batch is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from deepspeed.runtime.pipe import schedule


class MicroBatchGate(Protocol):
    """Decides whether a replica starts its next micro-batch."""

    def time_left_s(self, micro_batch: int) -> float:
        """Seconds in which the replica may still start it; infinite without a limit. Called on the deciding rank.

        Args:
            micro_batch: the next one; the first is 0.
        """
        ...

    def may_start(self, micro_batch: int) -> bool:
        """Whether the replica starts it; called on every rank just before the forward pass.

        Collective: the ranks of the replica, each at its own time.
        """
        ...

    def announce(self, micro_batch: int, starts: bool) -> None:
        """Send the decision to the next stage; called where the activation of this micro-batch is sent, or would be."""
        ...


class GatedSchedule(schedule.TrainSchedule):
    """The training schedule of one stage, decided while it runs.

    ``may_start`` is called before each forward pass, ``announce`` with the decision, where the next stage waits for it.
    """

    def __init__(
        self,
        micro_batches: int,
        stages: int,
        stage_id: int,
        may_start: Callable[[int], bool],
        announce: Callable[[int, bool], None],
    ) -> None:
        super().__init__(micro_batches=micro_batches, stages=stages, stage_id=stage_id)
        self._may_start, self._announce = may_start, announce
        self._num_buffers = super().num_pipe_buffers()
        self._refused: int | None = None

    def num_pipe_buffers(self) -> int:
        """Micro-batches in flight on this stage, as planned."""
        return int(self._num_buffers)

    def steps(self) -> Iterator[list[Any]]:
        """Lists of instructions; decisions are made between them.

        A refused micro-batch sets ``micro_batches`` to the number completed; from there on the order is that of the
        shorter step.
        """
        slot, previous = 0, -1
        while slot < 2 * (self.micro_batches + self.stages - 1):
            current, is_forward = self._step_to_micro_batch(slot)
            yield from self._forward(current, previous) if is_forward else self._backward(current, previous)
            slot, previous = slot + 1, current
        yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

    def _forward(self, current: int, previous: int) -> Iterator[list[Any]]:
        if self._valid_micro_batch(previous) and not self.is_first_stage:
            yield [schedule.SendGrad(self._buffer_idx(previous))]
        if not self._valid_micro_batch(current):
            return
        if not self._may_start(current):
            self.micro_batches, self._refused = current, current
            return
        buffer = self._buffer_idx(current)
        if not self.is_first_stage:
            yield [schedule.RecvActivation(buffer)]
        if self.is_first_stage or self.is_last_stage:
            yield [schedule.LoadMicroBatch(buffer)]
        yield [schedule.ForwardPass(buffer)]

    def _backward(self, current: int, previous: int) -> Iterator[list[Any]]:
        works = self._valid_micro_batch(current)
        if works and not self.is_last_stage:
            yield [schedule.RecvGrad(self._buffer_idx(current))]
        if not self.is_last_stage:
            if previous == self._refused:
                self._announce(previous, False)
            elif self._valid_micro_batch(previous):
                self._announce(previous, True)
                yield [schedule.SendActivation(self._buffer_idx(previous))]
        if works:
            yield [schedule.BackwardPass(self._buffer_idx(current))]
