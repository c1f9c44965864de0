"""Training engine of one optimizer step: our subclass of DeepSpeed's PipelineEngine.

It adds to DeepSpeed's engine: hooks around every micro-batch and before the optimizer step, one reduction of what they
have all ranks agree on, the number of the micro-batch that a buffer holds, losses weighted by the tokens used, the sum
of partial gradients under sequence parallelism, and whether and why a step was skipped. It is used with one stage too.
Names that start with an underscore are DeepSpeed 0.19's; a test fails if they disappear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from megasdc.data.position import UnevenSplit
from megasdc.engine.partial_backward import PartialBackward
from megasdc.engine.schedules import (
    BubbleSchedule,
    GatedSchedule,
    MicroBatchGate,
    ReplayBackward,
    ReplayForward,
    SpareTime,
    StageReplay,
)
from megasdc.model.randomness import DropoutStreams
from megasdc.optim.zero1 import (
    StepControl,
    accumulated_gradient,
    complete_gradients,
    gradients_set_aside,
    loss_scale,
    scale_each_gradient,
    scale_gradients,
)
from megasdc.parallel.collectives import StepAgreement
from megasdc.parallel.dims import ParallelDims

_OF_NEXT = (schedule.LoadMicroBatch, schedule.RecvActivation, schedule.ForwardPass)
"""Instructions of the micro-batch that this stage starts next."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Args:
        step: number of the step; the first is 1.
        loss: mean loss over the tokens used, in nats; on all ranks.
        tokens: tokens used, over all replicas.
        grad_norm: 2-norm of the whole gradient before clipping; infinite when it was not finite.
        learning_rate: learning rate of the first parameter group in this step.
        skipped: reason why the optimizer did not step; None: it did.
        loss_scale: loss scale of fp16 training, else 1.
        micro_batches: number of completed micro-batches, over all replicas.
    """

    step: int
    loss: float
    tokens: int
    grad_norm: float
    learning_rate: float
    skipped: str | None
    loss_scale: float
    micro_batches: int

    @property
    def is_finite(self) -> bool:
        """Whether the optimizer took the step, with a finite loss and gradient norm."""
        return self.skipped is None and math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class TrainingEngine(PipelineEngine):
    """DeepSpeed's pipeline engine with hooks, averages over the tokens used, and numbered micro-batches.

    Args:
        streams: dropout streams of the model; None: it has no dropout.
        masks_tokens: whether the data can mask tokens out of the loss.
        **options: passed to DeepSpeed's engine.

    Collective: all ranks of the world.
    """

    loss: Any
    """Loss of the last forward pass, on the last stage; DeepSpeed's."""

    def __init__(
        self,
        *,
        dims: ParallelDims,
        streams: DropoutStreams | None = None,
        masks_tokens: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.dims = dims
        self.hooks: list[Any] = []
        """Hooks in the order of their calls; each is a ``megasdc.engine.hooks.Hook``, whose module imports this one."""
        self.agreement = StepAgreement(None)
        """Reduction of the hooks' fields over all ranks, once in a step."""
        self.step_control = StepControl(self.optimizer, self.mpu.get_data_parallel_group())
        self.streams = streams
        self.masks_tokens = masks_tokens
        self.gate: MicroBatchGate | None = None
        """Decision which micro-batches this replica starts; None: all of them."""
        self.replay: StageReplay | None = None
        """Replay of one micro-batch of the next step, in the time in which this stage would wait; None: no replay."""
        self.is_replaying = False
        self.divides_by_used = False
        """Whether gradients are averaged over completed instead of planned micro-batches."""
        self.deal: UnevenSplit | None = None
        """Division of a step's micro-batches among replicas that take different numbers; None: all take as many."""
        self._partial_sums = [
            parameter
            for parameter in self.module.parameters()
            if getattr(parameter, "sequence_parallel", False) or getattr(parameter, "partial_over_tensor", False)
        ]
        self.shared_source: int | None = None
        self.partial: PartialBackward | None = None
        """Ends backward passes between layers, with one stage and one tensor rank; None: all are whole."""
        self.gradient_factor = torch.ones((), dtype=torch.float64)
        """Factor applied to the mean of the replicas' gradients in this step, 0-d; see ``gradient_factor_of``."""
        self._factors = torch.ones(1, dtype=torch.float64)
        self._ended: dict[int, int] = {}
        self._repeats = False
        self._running_step: int | None = None
        self._skipped_before = 0
        self._micro_batch_of_buffer: dict[int, int] = {}
        self._started = 0
        self._completed = 0
        self._tokens: list[torch.Tensor] = []
        self._totals = torch.zeros(3, dtype=torch.float64)

    def set_uneven_split(self, deal: UnevenSplit) -> None:
        """Take another number of micro-batches in each step; gradients are averaged over those that all have taken."""
        self.deal, self.divides_by_used = deal, True

    @property
    def samples_per_step(self) -> int:
        """Samples of a step as planned, over all replicas."""
        if self.deal is None:
            return int(self.train_batch_size())
        return int(self.deal.micro_batches * self.micro_batch_size)

    @property
    def most_micro_batches(self) -> int:
        """Micro-batches of a step as planned now, on the replica that takes most; the same on all ranks."""
        return int(self.micro_batches if self.deal is None else -(-self.deal.micro_batches // self.deal.replicas))

    # --- one step -----------------------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """The running step, else the next one; the first is 1."""
        return self.global_steps + 1 if self._running_step is None else self._running_step

    @property
    def used_norm(self) -> Any:
        """Norm by which this rank clips in the running step, or the last one, loss scale included; None: by none."""
        return self.step_control.used_norm

    @property
    def is_skipped(self) -> bool:
        """Whether the optimizer skipped the running step; valid in ``after_optimizer_step``."""
        return bool(self.skipped_steps > self._skipped_before)

    def train_step(self, batches: Iterator[Any]) -> StepResult:
        """Run one optimizer step.

        Args:
            batches: iterator over this replica's micro-batches.

        Returns:
            The result, the same on all ranks.

        Collective: all ranks of the world.
        Sync: waits for the device.
        """
        step, self._skipped_before = self.step_number, self.skipped_steps
        if self.deal is not None:
            self.micro_batches = self.deal.count(step, self.dims.dp_rank)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self._begin()
        self._ended.clear()
        for hook in self.hooks:
            hook.before_micro_batches(self)
        self._running_step = step  # DeepSpeed increments global_steps before the last hooks of a step
        try:
            self.train_batch(data_iter=batches)
        finally:
            self._running_step = None
        self.agreement.finish()
        loss_sum, used, completed = self._totals.tolist()
        # DeepSpeed has added the planned samples; only completed ones count
        self.global_samples += round(completed) * self.micro_batch_size - self.train_batch_size()
        norm = self.get_global_grad_norm()
        norm = math.nan if norm is None else float(norm)
        skipped = None
        if self.is_skipped:
            skipped = "gradient overflow at this loss scale" if self.fp16_enabled() else "gradient norm is not finite"
        return StepResult(
            step=step,
            loss=loss_sum / used if used else math.nan,
            tokens=round(used * self._planned_tokens),
            grad_norm=norm,
            learning_rate=learning_rate,
            skipped=skipped,
            loss_scale=loss_scale(self),
            micro_batches=round(completed),
        )

    def evaluate(self, batches: Iterator[Any], num_micro_batches: int) -> float:
        """Mean loss over the tokens of some micro-batches, without dropout and without gradients.

        Args:
            batches: iterator over this replica's micro-batches.
            num_micro_batches: number of micro-batches that this replica evaluates.

        Returns:
            Mean over all replicas in nats, on all ranks.

        Collective: all ranks of the world.
        """
        self._begin()
        monitor_enabled, self.monitor.enabled = self.monitor.enabled, False
        hooks, self.hooks = self.hooks, []  # hooks are for training micro-batches only
        try:
            loss = self.eval_batch(batches, num_micro_batches=num_micro_batches)
        finally:
            self.monitor.enabled = monitor_enabled
            self.hooks = hooks
        self.module.train()
        return float(loss)

    def _begin(self) -> None:
        self._started = 0
        self._micro_batch_of_buffer.clear()
        self._tokens = []
        self._planned_tokens = 1

    # --- micro-batches once more --------------------------------------------------------------------------------

    def recompute_step(self) -> None:
        """Discard the gradients of this step and rerun the micro-batches that this replica completed.

        The data iterator must yield the step's micro-batches again.

        Collective: all ranks of the replica, in ``Hook.after_micro_batches``.
        """
        self.optimizer.zero_grad()
        self._begin()
        self.total_loss = None
        with self._repeating():
            self._run_micro_batches(self._completed)

    def recompute_micro_batch(self, micro_batch: int) -> None:
        """Recompute one micro-batch of this step for the hooks; gradients and losses are restored.

        The data iterator must yield this micro-batch, numbered in the step, next.

        Collective: all ranks of the replica, in ``Hook.after_micro_batches``, or in ``after_optimizer_step`` of
            a skipped step, whose parameters are unchanged.
        """
        with self._set_aside(), self._repeating():
            self._started = micro_batch
            self._run_micro_batches(1)

    def compute_extra(self, source: int) -> None:
        """Compute a micro-batch that is none of the step's, as a replay; gradients and losses of the step stay.

        It has the number 0, and the places of replica ``source``'s first one. The data iterator must yield it next.

        Collective: all ranks of the replica, in ``Hook.after_micro_batches``, whatever the replica completed.
        """
        shared, self.shared_source = self.shared_source, source
        self.is_replaying = True
        try:
            with self._set_aside():
                self._run_micro_batches(1)
        finally:
            self.is_replaying = False
            self.shared_source = shared

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Context in which micro-batches begin with no gradient and no loss; at its end the step's are restored."""
        kept = self.total_loss, self._tokens, self._planned_tokens
        with gradients_set_aside(self.optimizer):
            self._begin()
            self.total_loss = None
            yield
        self.total_loss, self._tokens, self._planned_tokens = kept
        self._started = self._completed

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """Context in which backward passes end where they ended in the step."""
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False

    @property
    def _called(self) -> Sequence[Any]:
        """The hooks that are called around passes."""
        return [hook for hook in self.hooks if hook.in_replays] if self.is_replaying else self.hooks

    def _run_micro_batches(self, num_micro_batches: int) -> None:
        whole = schedule.TrainSchedule(micro_batches=num_micro_batches, stages=self.num_stages, stage_id=self.stage_id)
        self._exec_schedule(_MicroBatchesAlone(whole))

    # --- instructions -------------------------------------------------------------------------------------------

    @property
    def completed(self) -> int:
        """Micro-batches of this step that this replica has completed; valid from ``after_micro_batches`` on."""
        return self._completed

    @property
    def ended_after(self) -> int | None:
        """Transformer layers after which the last backward pass of this step was ended; None: it is whole."""
        return self._ended.get(self._completed - 1)

    @property
    def decides(self) -> bool:
        """Whether this rank decides which micro-batches its replica starts."""
        return bool(self.is_first_stage()) and self.dims.tp_rank == 0

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Called by ``train_batch`` with DeepSpeed's schedule, which is replaced where a gate is set."""
        if self.gate is not None and type(pipe_schedule) is schedule.TrainSchedule:
            pipe_schedule = GatedSchedule(
                self.micro_batches, self.num_stages, self.stage_id, self._may_start, self.gate.announce
            )
        replays = self.replay is not None
        if isinstance(pipe_schedule, schedule.TrainSchedule) and (replays or self.num_stages > 1):
            pipe_schedule = BubbleSchedule(pipe_schedule, replays=replays)
        super()._exec_schedule(pipe_schedule)

    def _backward_prologue_per_tensor(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Divide by the accumulation steps on the last stage only, whose gradients the other stages receive.

        DeepSpeed's engine does so from 0.19.3 on; before, each further stage divided the gradients again.
        """
        scaled: torch.Tensor | None = super()._backward_prologue_per_tensor(grad) if self.is_last_stage() else grad
        return scaled

    def watch_instructions(self, watcher_of: Callable[[type], Callable[[int], None] | None]) -> None:
        """Call a function before each instruction of the schedule, with its micro-batch, -1: of none.

        Args:
            watcher_of: returns the function for a kind of instruction; None: that kind is not watched.
        """

        def watched(kind: type, method: Callable[..., Any]) -> Callable[..., Any]:
            watcher, is_of_next = watcher_of(kind), kind in _OF_NEXT
            if watcher is None:
                return method

            def run(engine: TrainingEngine, buffer_id: int | None = None, **options: Any) -> Any:
                if buffer_id is None:
                    watcher(-1)
                    return method(engine, **options)
                watcher(engine._started if is_of_next else engine._micro_batch_of_buffer.get(buffer_id, -1))
                return method(engine, buffer_id=buffer_id, **options)

            return run

        self._INSTRUCTION_MAP = {kind: watched(kind, method) for kind, method in self._INSTRUCTION_MAP.items()}

    def _may_start(self, micro_batch: int) -> bool:
        assert self.gate is not None
        if self.decides:
            self._log_start(micro_batch, self.gate.time_left_s(micro_batch))
        return self.gate.may_start(micro_batch)

    def _log_start(self, micro_batch: int, time_left_s: float) -> None:
        for hook in self.hooks:
            hook.before_start(self, micro_batch, time_left_s)

    @property
    def next_micro_batch(self) -> int:
        """Number of the micro-batch that this stage starts next."""
        return self._started

    def labels_of(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and loss mask of a micro-batch in flight on the last stage, each [b, s], as the loss is given them."""
        buffer_id = next(buffer for buffer, number in self._micro_batch_of_buffer.items() if number == micro_batch)
        labels, loss_mask = self.pipe_buffers["labels"][buffer_id]
        return labels, loss_mask

    def sample_places(self, micro_batch: int) -> tuple[int, ...]:
        """Indices of a micro-batch's samples in the global batch of the step, [b].

        The k-th sample that replica r takes in a step is number k * replicas + r, whatever the micro-batch size; where
        micro-batches are dealt, those of one follow each other. Where ``shared_source`` is set, the first micro-batch
        is that replica's on all replicas.
        """
        source = self.shared_source if micro_batch == 0 else None
        replica = self.dims.dp_rank if source is None else source
        first = micro_batch * self.micro_batch_size
        if self.deal is not None:
            first = self.deal.place(self.step_number, replica, micro_batch) * self.micro_batch_size
            return tuple(range(first, first + self.micro_batch_size))
        return tuple((first + i) * self.dims.data + replica for i in range(self.micro_batch_size))

    def _enter(self, micro_batch: int) -> None:
        if self.streams is not None:
            self.streams.enter(self.step_number, self.sample_places(micro_batch))

    def _run_forward(self, buffer_id: int) -> None:
        micro_batch = self._started
        if self.gate is None and self.decides and not self.is_replaying:
            self._log_start(micro_batch, math.inf)
        self._started += 1
        self._micro_batch_of_buffer[buffer_id] = micro_batch
        self._enter(micro_batch)
        for hook in self._called:
            hook.before_forward(self, micro_batch)
        if self.replay is not None and self.replay.micro_batch == micro_batch:
            self.replay.keep_inputs(self, buffer_id)
        may_end: AbstractContextManager[None] = nullcontext()
        if self.partial is not None and not self._stays_whole(micro_batch):
            may_end = self.partial.forward()
        with may_end:
            super()._exec_forward_pass(buffer_id)
        if self.is_last_stage():
            mask = self.pipe_buffers["labels"][buffer_id][1]
            self._planned_tokens = mask.numel()
            self._tokens.append(mask.sum(dtype=torch.float64) / mask.numel())
        for hook in self._called:
            hook.after_forward(self, micro_batch)

    def _run_backward(self, buffer_id: int) -> None:
        micro_batch = self._micro_batch_of_buffer.pop(buffer_id)
        self._enter(micro_batch)
        for hook in self._called:
            hook.before_backward(self, micro_batch)
        if self.replay is not None and self.replay.micro_batch == micro_batch:
            self.replay.keep_gradient(self)
        if self.partial is None:
            super()._exec_backward_pass(buffer_id)
        else:
            self._run_partial_backward(self.partial, micro_batch, buffer_id)
        for hook in self._called:
            hook.after_backward(self, micro_batch)

    def _stays_whole(self, micro_batch: int) -> bool:
        """Whether the micro-batch is compared with others, or repeated, by an audit: its backward pass is not ended."""
        audited = micro_batch == 0 and (self.shared_source is not None or self.replay is not None)
        return audited or self.is_replaying

    def _run_partial_backward(self, partial: PartialBackward, micro_batch: int, buffer_id: int) -> None:
        """A backward pass that may be ended; what follows one in DeepSpeed is done here, and its graph is freed."""
        ended, run = self._ended.get(micro_batch), super()._exec_backward_pass

        def goes_on(layers: int) -> bool:
            return layers != ended if self._repeats else partial.goes_on(micro_batch, layers)

        layers = partial.backward(lambda: run(buffer_id), goes_on)
        if layers is None:
            return
        self._ended[micro_batch] = layers
        self._backward_epilogue()
        complete_gradients(self.optimizer)
        self.loss = self.loss.detach()
        self.pipe_buffers["outputs"][buffer_id] = self.pipe_buffers["outputs"][buffer_id].detach()

    def _run_replay_forward(self, buffer_id: int) -> None:
        assert self.replay is not None
        with self._replaying(self.replay) as hooks:
            for hook in hooks:
                hook.before_forward(self, self.replay.micro_batch)
            self.replay.forward(self, buffer_id)
            for hook in hooks:
                hook.after_forward(self, self.replay.micro_batch)

    def _run_replay_backward(self, buffer_id: int) -> None:
        assert self.replay is not None
        with self._replaying(self.replay) as hooks:
            for hook in hooks:
                hook.before_backward(self, self.replay.micro_batch)
            self.replay.backward(self, buffer_id)
            for hook in hooks:
                hook.after_backward(self, self.replay.micro_batch)

    def _run_spare_time(self) -> None:
        for hook in self.hooks:
            hook.while_waiting(self)

    @contextmanager
    def _replaying(self, replay: StageReplay) -> Iterator[Sequence[Any]]:
        """Context in which the engine replays a micro-batch; yields the hooks that are called around its passes."""
        self._enter(replay.micro_batch)
        self.is_replaying = True
        try:
            yield self._called
        finally:
            self.is_replaying = False

    def _run_reduce_tied_grads(self) -> None:
        self._completed = self._started
        for hook in tuple(self.hooks):  # a copy: an observer may be attached or removed meanwhile
            hook.after_micro_batches(self)
        super()._exec_reduce_tied_grads()
        if self._partial_sums:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group()
            for parameter in self._partial_sums:
                dist.all_reduce(accumulated_gradient(self.optimizer, parameter), group=group)

    def _run_reduce_grads(self) -> None:
        for hook in self.hooks:
            hook.before_reduction(self)
        super()._exec_reduce_grads()
        self._totals = self._reduce_totals(self.total_loss)
        # DeepSpeed has divided by the planned number already
        planned = float(self.gradient_accumulation_steps() * self.dims.data)
        if self.partial is not None:
            self._factors = planned / self._reduce_reached(self.partial.num_layers + 2)
            self.gradient_factor = self._factors[0]
            scale_each_gradient(self.optimizer, self.gradient_factor_of)
        elif self.masks_tokens or self.divides_by_used:
            wanted = planned if self.divides_by_used else self._totals[2]
            self.gradient_factor = wanted / self._totals[1]
            scale_gradients(self.optimizer, self.gradient_factor)

    def _run_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        for hook in self.hooks:
            hook.before_optimizer_step(self)
        self.agreement.start(field for hook in self.hooks for field in hook.fields)  # runs while the optimizer steps
        super()._exec_optimizer_step(lr_kwargs)
        for hook in tuple(self.hooks):
            hook.after_optimizer_step(self)

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _run_forward,
        schedule.BackwardPass: _run_backward,
        ReplayForward: _run_replay_forward,
        ReplayBackward: _run_replay_backward,
        SpareTime: _run_spare_time,
        schedule.ReduceTiedGrads: _run_reduce_tied_grads,
        schedule.ReduceGrads: _run_reduce_grads,
        schedule.OptimizerStep: _run_optimizer_step,
    }

    # --- averages -----------------------------------------------------------------------------------------------

    def gradient_factor_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Factor applied to the mean of the replicas' gradients of one parameter in this step, 0-d, fp64."""
        return self.gradient_factor if self.partial is None else self._factors[self.partial.needs(parameter)]

    def _reduce_reached(self, kinds: int) -> torch.Tensor:
        """Tokens of backward passes that came through at least n layers, over all replicas, [kinds], n from 0.

        The last number is of whole passes; infinite where there is none, so that what they alone reach stays 0. All are
        divided by the planned tokens of a micro-batch.

        Collective: the data group.
        """
        tokens = torch.stack(self._tokens)
        whole = kinds - 1
        through = torch.tensor([self._ended.get(one, whole) for one in range(len(tokens))], device=tokens.device)
        reached = torch.stack([tokens[through >= needed].sum() for needed in range(kinds)])
        if self.is_data_parallel:
            dist.all_reduce(reached, group=self.mpu.get_data_parallel_group())
        return torch.where(reached > 0, reached, math.inf)

    def _reduce_totals(self, loss_sum: torch.Tensor | None) -> torch.Tensor:
        """Totals of the step over all replicas: [sum of losses, used tokens, micro-batches], [3].

        The first two are divided by the planned tokens of a micro-batch.

        Collective: the data group of the last stage, then each replica's pipeline group.
        """
        totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        if self.is_last_stage():
            if loss_sum is not None:
                totals[0] = loss_sum.double()
                totals[1] = torch.stack(self._tokens).sum()
                totals[2] = len(self._tokens)
            totals[3] = self._planned_tokens
            if self.is_data_parallel:
                dist.all_reduce(totals[:3], group=self.mpu.get_data_parallel_group())
        if self.is_pipe_parallel:
            source = self.grid.stage_to_global(self.num_stages - 1)
            dist.broadcast(totals, src=source, group=self.mpu.get_pipe_parallel_group())
            self._planned_tokens = int(totals[3])
        return totals[:3]

    def _aggregate_total_loss(self) -> torch.Tensor:
        """Mean loss over the tokens used; replaces DeepSpeed's mean over planned micro-batches."""
        return (self._totals[0] / self._totals[1]).float()

    def _reduce_outputs(self, outputs: Any, **_: Any) -> Any:
        """Sum of this replica's losses on the last stage; called by ``eval_batch``."""
        return torch.stack(outputs).sum()

    def _bcast_pipe_scalar(self, data: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Mean loss over the tokens of all replicas, on all stages; called by ``eval_batch``."""
        totals = self._reduce_totals(data)
        return (totals[0] / totals[1]).float()


class _MicroBatchesAlone:
    """DeepSpeed's training schedule without the instructions that end the step."""

    def __init__(self, whole: schedule.TrainSchedule) -> None:
        self._whole = whole

    def num_pipe_buffers(self) -> int:
        """Micro-batches in flight on this stage."""
        return int(self._whole.num_pipe_buffers())

    def __iter__(self) -> Iterator[list[Any]]:
        end = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
        for instructions in self._whole.steps():
            yield [one for one in instructions if not isinstance(one, end)]


def build_engine(
    pipeline: Any, deepspeed_config: dict[str, Any], groups: list[dict[str, Any]], **options: Any
) -> TrainingEngine:
    """Build the engine of a stage, as ``deepspeed.initialize`` builds DeepSpeed's own.

    Args:
        pipeline: model of the stage.
        groups: parameter groups of the optimizer.
        **options: arguments of ``TrainingEngine``.

    Collective: all ranks of the world.
    """
    mpu = pipeline.mpu()
    return TrainingEngine(
        args=None,
        model=pipeline,
        optimizer=None,
        model_parameters=groups,
        mpu=mpu,
        config=deepspeed_config,
        config_class=DeepSpeedConfig(deepspeed_config, mpu),
        dont_change_device=True,
        **options,
    )
