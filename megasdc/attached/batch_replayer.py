"""A batch of training that all replicas compute alike, beside training, and leave no trace of.

What the model was given in the first forward pass of an audited step on one replica is sent to the others. All compute
it forward and backward with the same random numbers and buffers. ``torch.autograd.grad`` writes no gradient and calls
no hook of ZeRO; random state, buffers and all else that submodules keep are put back.

How many operations have used a parameter is counted, too: gradients of those with several are sums.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasdc.attached.attributes import NotKept, equal_bits, preserve_attributes
from megasdc.attached.record import ResultRecorder
from megasdc.common.errors import ConfigError
from megasdc.config.sections import DeterminismSection
from megasdc.determinism import capture_rng, restore_rng, seed_generators, set_deterministic
from megasdc.parallel.collectives import broadcast_object
from megasdc.sdc.trace import Trace
from megasdc.tensors.nested import map_in, tensors_in

PASSING = ("ToCopyBackward0", "TBackward0")
"""Nodes between a parameter and its use: a cast, which automatic mixed precision keeps; a transposition."""


def count_uses(outputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of operations that use each parameter, by name, from results whose graph is still there."""
    users: defaultdict[Any, list[Any]] = defaultdict(list)
    waiting = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for before, _ in node.next_functions:
            if before is None:
                continue
            users[before].append(node)
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    leaves = {id(node.variable): node for node in seen if hasattr(node, "variable")}
    return {name: _count_users(leaves.get(id(one)), users) for name, one in named.items()}


def _count_users(node: Any, users: Mapping[Any, Sequence[Any]]) -> int:
    of_node = users.get(node, ())
    return sum(_count_users(one, users) if one.name() in PASSING else 1 for one in of_node)


FP16_SCALE = 1024.0
"""Factor of gradients in fp16, where small ones would become zero; a power of two changes no other bit."""
OF_STAGES = ("micro_offset", "activation_checkpoint_interval")
"""Attributes of DeepSpeed's ``PipelineModule`` that are 0 while a batch is audited: the number of forward passes, which
seeds layers, and the number of layers between activation checkpoints, which are reentrant."""


@dataclass(frozen=True)
class SentTensor:
    """A tensor on its way to another rank."""

    value: Tensor
    requires_grad: bool
    on_host: bool


@dataclass(frozen=True)
class Batch:
    """Inputs of the model's forward pass, with all that they need to be computed on another replica.

    Args:
        autocast: type of automatic mixed precision; None: it was off.
        buffers: buffers of the replica whose batch it is, by name.
    """

    args: tuple[Any, ...]
    options: dict[str, Any]
    autocast: torch.dtype | None
    buffers: Mapping[str, Tensor]


class BatchReplayer:
    """Keeps batches of one replica, sends them to the others, and computes them.

    Args:
        model: model that the engine trains.
        device: device of its parameters.
        recorder: recorder of the results of submodules.
        seed: seed of random numbers in audits.
        wants: returns the running step, if this rank must keep its first batch; else None.
        setting: beginning of error messages, which names a setting, and the value of it that they advise.

    Attributes:
        uses: number of operations that use each parameter, by name, in the last batch for which ``uses`` was asked.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        recorder: ResultRecorder,
        seed: int,
        wants: Callable[[], int | None],
        setting: tuple[str, str] = ("audit.enabled: got true", "false"),
    ) -> None:
        self._model, self._device, self._recorder, self._seed = model, device, recorder, seed
        self._wants, (self._said, self._off) = wants, setting
        self._kept: tuple[int, bytes | str] | None = None
        self._looks_at_uses = False
        self.uses: Mapping[str, int] = {}
        self._handle = model.register_forward_pre_hook(self._capture, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook on forward passes."""
        self._handle.remove()

    def _capture(self, _module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        step = self._wants()
        if step is None or not (self._model.training and torch.is_grad_enabled()):
            return
        if self._kept is not None and self._kept[0] == step:
            return

        def sent(tensor: Tensor) -> SentTensor:
            return SentTensor(tensor.detach().cpu(), tensor.requires_grad, tensor.device.type == "cpu")

        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        buffers = {name: value.detach().cpu() for name, value in self._model.named_buffers()}
        batch = Batch(map_in(Tensor, args, sent), map_in(Tensor, options, sent), autocast, buffers)
        try:
            file = io.BytesIO()
            torch.save(batch, file)
            self._kept = step, file.getvalue()
        except Exception as error:  # of any class: what a model is given need not be plain values
            reason = f"what the model was given cannot be sent to other ranks: {type(error).__name__}: {error}"
            self._kept = step, reason

    def share(self, step: int, source: int, group: dist.ProcessGroup | None) -> Batch:
        """The batch of a step that a rank has kept, on all ranks of a host group that hold the same parameters.

        Raises:
            ConfigError: the batch cannot be sent, or no forward pass was seen; on all ranks of the group.

        Collective: the group.
        """
        found_none = "no forward pass of the engine's model with gradients was seen in this step"
        own: bytes | str = self._kept[1] if self._kept is not None and self._kept[0] == step else found_none
        held: Any = broadcast_object(own, source, group)
        self._kept = None
        if isinstance(held, str):
            raise ConfigError(f"{self._said}, and no batch can be computed: {held}; set it to {self._off}.")
        found = torch.load(io.BytesIO(held), weights_only=False)  # from a rank of this very training
        assert isinstance(found, Batch), "what _capture has written"
        return found

    def compute(self, batch: Batch, step: int, state: dict[str, Any] | None = None, *, uses: bool = False) -> Trace:
        """Compute a batch forward and backward; returns the trace of its submodules' results.

        Args:
            state: state of random generators with which the training computes it; None: seeded, in deterministic mode.
            uses: whether uses of parameters are counted, too.

        Raises:
            ConfigError: the model cannot be computed so; the message says why and what helps.

        Sync: waits for the device.
        """
        self._looks_at_uses = uses
        with self._as_of(batch, step, state), self._recorder.recording(step):
            try:
                outputs, inputs = self._forward(batch)
                self._recorder.end_forward(outputs)
                self._recorder.add_gradients(self._backward(outputs, inputs))
            except RuntimeError as error:
                if (reason := _why_not(error)) is None:
                    raise
                first = "" if isinstance(error, NotKept) else f" {str(error).splitlines()[0]}"
                raise ConfigError(f"{self._said}, and {reason}; or set it to {self._off}.{first}") from error
        return self._recorder.pop_trace()

    def _forward(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Loss, where the model computes it, else all results with gradients; and the inputs that get gradients.

        A stage of a pipeline gives its inputs' gradients to the one before.
        """
        inputs = []

        def received(sent: SentTensor) -> Tensor:
            value = (sent.value if sent.on_host else sent.value.to(self._device)).clone()
            if sent.requires_grad:
                inputs.append(value.requires_grad_())
            return value

        args, options = map_in(SentTensor, batch.args, received), map_in(SentTensor, batch.options, received)
        mixed = torch.autocast(self._device.type, batch.autocast, enabled=batch.autocast is not None)
        with torch.enable_grad(), mixed:
            output = self._model.forward(*args, **options)  # hooks of the engine on the model are not called
        loss = output.get("loss") if isinstance(output, Mapping) else None
        found = [loss] if isinstance(loss, Tensor) else list(tensors_in(output))
        return [one for one in found if one.requires_grad], inputs

    def _backward(self, outputs: list[Tensor], inputs: list[Tensor]) -> dict[str, Tensor | None]:
        """Gradients of all parameters, by name; results that are no loss are summed with random weights first."""
        named = {name: one for name, one in self._model.named_parameters() if one.requires_grad}
        half = any(one.dtype == torch.float16 for one in named.values())
        draw = torch.Generator().manual_seed(self._seed)
        weights = []
        for one in outputs:
            drawn = torch.ones(()) if one.numel() == 1 else torch.randn(one.shape, generator=draw) / one.numel() ** 0.5
            weights.append((drawn * (FP16_SCALE if half else 1.0)).expand(one.shape).to(one))
        if not outputs:  # nothing of this stage is trained
            return {}
        if self._looks_at_uses:
            self.uses = count_uses(outputs, named)
        gradients = torch.autograd.grad(outputs, [*named.values(), *inputs], weights, allow_unused=True)
        return dict(zip(named, gradients, strict=False))  # submodules have seen those of inputs

    @contextmanager
    def _as_of(self, batch: Batch, step: int, state: dict[str, Any] | None) -> Iterator[None]:
        """Context of deterministic mode, the batch's buffers and equal random numbers; all is undone at its end."""
        own = capture_rng()
        with preserve_attributes(self._model):
            stage = [name for name in OF_STAGES if hasattr(self._model, name)]
            undo = set_deterministic(DeterminismSection(enabled=state is None))
            try:
                vars(self._model).update(dict.fromkeys(stage, 0))
                _fill(self._model, batch.buffers)
                if state is None:
                    seed_generators(self._seed, step, 0)
                else:
                    restore_rng(state)
                yield
            finally:
                undo()
                restore_rng(own)


def _why_not(error: RuntimeError) -> str | None:
    """Reason why PyTorch cannot compute a model beside training, and the remedy; None: an error of another kind."""
    text = str(error)
    if isinstance(error, NotKept):
        return text
    if "checkpoint" in text.lower():
        return (
            "the model recomputes activations by reentrant checkpointing, which torch.autograd.grad cannot pass: use "
            'use_reentrant=False (in Hugging Face: gradient_checkpointing_kwargs={"use_reentrant": False})'
        )
    if "deterministic" in text:
        return "an operation of the model does not repeat bit for bit, so that replicas cannot be compared: replace it"
    if "modified inplace" in text:
        return "a submodule writes into its inputs, whose gradients are looked at: choose others by audit.submodules"
    return None


def _fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the model's buffers the values of these names; equal ones are not written to."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name not in values or values[name].shape != buffer.shape:
                continue
            given = values[name].to(buffer)
            if buffer.layout != torch.strided or not equal_bits(given, buffer):
                buffer.copy_(given)
