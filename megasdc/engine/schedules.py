"""Pipeline schedules beside DeepSpeed's: micro-batches that may not be started, and work where a stage would wait.

``GatedSchedule``, for DropCompute: a stage whose replica may stop starting micro-batches in the middle of a step.
DeepSpeed's 1F1B order, slot by slot: before each forward slot the stage learns whether its replica starts the
micro-batch. Stage 0 asks the gate; a later stage receives the decision from the stage before, where the activation
would have been announced, so no rank waits for a message that is never sent. A started micro-batch is finished.

``BubbleSchedule``, for audits: a replay, and work of hooks, where a stage would wait for others. A replay is one
micro-batch of a step once more, on each stage alone. A stage repeats its forward pass from the activation that it
received, and its backward pass from the gradient that it received; so no stage waits for another's repeat. Passes of f
and b seconds leave each of S stages (S - 1)(f + b) seconds to wait in 1F1B:

- before the first gradient arrives: all stages but the last repeat their forward pass there;
- on the first stage, before each of the last S - 1 gradients: it repeats its backward pass before the first of them,
  and makes up for being late before the others, and while the next stage sends the last;
- after the last backward pass, for the stages before: all stages but the first repeat their backward pass there, and
  the last its forward pass; of two stages before it sends the last gradient, which the first is late to receive.

At the first and the last of these places of each stage hooks may do work of their own (``Hook.while_waiting``). With
two stages and b = 2 f, one third of a repeat remains that something waits for; with four and more than four
micro-batches nothing does, while a repeat takes as long as the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Protocol

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megasdc.optim.zero1 import gradients_set_aside


class MicroBatchGate(Protocol):
    """Decides whether a replica starts its next micro-batch."""

    def time_left_s(self, micro_batch: int) -> float:
        """Seconds in which the replica may still start it; infinite without a limit. Called on the deciding rank.

        Args:
            micro_batch: number of the next micro-batch; the first is 0.
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
        """Number of micro-batches in flight on this stage, as planned."""
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


class ReplayForward(schedule.BufferOpInstruction):  # type: ignore[misc]
    """Repeat a forward pass, in a buffer of its own."""


class ReplayBackward(schedule.BufferOpInstruction):  # type: ignore[misc]
    """Repeat the backward pass of the repeated forward pass."""


class SpareTime(schedule.PipeInstruction):  # type: ignore[misc]
    """Let hooks do work of their own."""


class BubbleSchedule:
    """The schedule of a stage, with a replay and work of hooks where the stage would wait.

    Args:
        whole: schedule of the step.
        replays: whether the step has a replay.
    """

    def __init__(self, whole: schedule.TrainSchedule, *, replays: bool) -> None:
        self._whole, self._replays = whole, replays

    def num_pipe_buffers(self) -> int:
        """Number of micro-batches in flight on this stage; one of them is the replay's."""
        return int(self._whole.num_pipe_buffers()) + 1

    def __iter__(self) -> Iterator[list[Any]]:
        whole, buffer = self._whole, self.num_pipe_buffers() - 1
        due: list[Any] = [ReplayForward(buffer), ReplayBackward(buffer)] if self._replays else []
        passes: list[type] = []
        waits = 0
        for instruction in chain.from_iterable(whole.steps()):
            kind = type(instruction)
            if kind is schedule.RecvGrad and self._waits_for(passes, waits):
                yield [*due[:1], SpareTime()]
                due, waits = due[1:], waits + 1
            elif kind is schedule.SendGrad and len(due) == 2 and self._is_late_to_receive(passes):
                yield [due.pop(0)]
            elif kind is schedule.ReduceTiedGrads:
                yield due if whole.is_first_stage else [*due, SpareTime()]
            if kind in (schedule.ForwardPass, schedule.BackwardPass):
                passes.append(kind)
            yield [instruction]

    def _waits_for(self, passes: Sequence[type], waits: int) -> bool:
        """Whether the stage waits for a gradient: the first, and on stage 0 those after the last forward pass."""
        return waits == 0 or (waits == 1 and self._whole.is_first_stage and passes[-1] is schedule.BackwardPass)

    def _is_late_to_receive(self, passes: Sequence[type]) -> bool:
        """Whether the first of two stages still replays when this one would send it the last gradient."""
        return bool(self._whole.num_stages == 2 and passes.count(schedule.BackwardPass) == self._whole.micro_batches)


class StageReplay:
    """Keeps what this stage receives for one micro-batch of a step, and computes the micro-batch once more from it.

    Gradients and losses of the step stay as they are. The activations of one more micro-batch are kept meanwhile.

    Args:
        micro_batch: number of the micro-batch in the step.
        around: makes the context that is entered around each pass.
    """

    def __init__(self, micro_batch: int, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.micro_batch, self._around = micro_batch, around
        self._received: dict[str, Any] = {}
        self._gradient: Any = None
        self._loss: Any = None

    def keep_inputs(self, engine: PipelineEngine, buffer_id: int) -> None:
        """Keep the inputs of the micro-batch's forward pass; the engine replaces them later, and never changes them.

        Args:
            buffer_id: buffer of the micro-batch.
        """
        self._received = {name: engine.pipe_buffers[name][buffer_id] for name in ("inputs", "labels")}

    def keep_gradient(self, engine: PipelineEngine) -> None:
        """Copy the gradient that the backward pass of the micro-batch is about to read."""
        if not engine.is_last_stage():
            self._gradient = _mapped(engine.grad_layer, Tensor.clone)

    def forward(self, engine: PipelineEngine, buffer_id: int) -> None:
        """Repeat the forward pass; nothing where this replica did not start the micro-batch.

        Args:
            buffer_id: buffer that no micro-batch of the step uses.
        """
        if not self._received:
            return
        engine.pipe_buffers["inputs"][buffer_id] = _mapped(self._received["inputs"], _as_received)
        engine.pipe_buffers["labels"][buffer_id] = self._received["labels"]
        kept = {name: getattr(engine, name) for name in ("loss", "total_loss", "total_additional_losses")}
        losses, engine.fwd_outputs = engine.fwd_outputs, []
        engine.total_loss = engine.total_additional_losses = None
        with self._around():
            PipelineEngine._exec_forward_pass(engine, buffer_id)
        self._loss, engine.fwd_outputs = engine.loss, losses
        for name, value in kept.items():
            setattr(engine, name, value)

    def backward(self, engine: PipelineEngine, buffer_id: int) -> None:
        """Repeat the backward pass, after ``forward`` with the same buffer."""
        if not self._received:
            return
        kept = engine.loss, engine.grad_layer
        engine.loss, engine.grad_layer = self._loss, self._gradient
        with gradients_set_aside(engine.optimizer), self._around():
            PipelineEngine._exec_backward_pass(engine, buffer_id)
        engine.loss, engine.grad_layer = kept
        for buffers in engine.pipe_buffers.values():
            buffers[buffer_id] = None


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Result of a function of a tensor, or of each tensor in a sequence."""
    if value is None or isinstance(value, Tensor):
        return None if value is None else function(value)
    return type(value)(map(function, value))


def _as_received(tensor: Tensor) -> Tensor:
    """Tensor with the same values, and a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
