"""Submodules of a stage, and hooks that observe each one's own result, forward and backward; probes of their inputs.

A result is observed before a collective mixes tensor ranks: the outputs of row-parallel and vocabulary-parallel layers
before their sum, and the input gradient of a column-parallel layer before its sum. Megatron-core's autograd function
hides the latter; while observers are attached the collective is moved out of that function, at the same point of the
computation and with the same bits. Without observers no hook is attached.

``InputProbe`` is for searches only: inputs tell a submodule that produced a value from one that received it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megasdc.common.addresses import BACKWARD, FORWARD, WEIGHT_GRAD
from megasdc.common.errors import ConfigError
from megasdc.model.gpt import FinalNorm, OutputLayer, PositionEmbedding, TransformerBlock, WordEmbedding
from megasdc.model.kinds import (
    ACTIVATION,
    BLOCK_PARTS,
    CORE_ATTENTION,
    EMBEDDING,
    FC1,
    FC2,
    FINAL_NORM,
    HEAD,
    LAST_NORM,
    LOSS,
    LOSS_FQN,
    OUTPUT,
    POSITION_EMBEDDING,
    POSITIONS,
    PROJECTION,
    QKV,
    WORD_EMBEDDINGS,
)

Emit = Callable[[str, str, str, Tensor], Tensor | None]
"""Function of (phase, fqn, slot, result), which returns None, or a value that replaces the result."""

_COLUMN = frozenset({QKV, FC1, HEAD})
_ROW = frozenset({PROJECTION, FC2})


@dataclass(frozen=True)
class Submodule:
    """One entry of the catalogue.

    Args:
        fqn: full name; its first number is the index of the layer in the whole pipeline.
        kind: one of ``megasdc.model.kinds.KINDS``.
        module: module of the submodule; None for an activation, which Megatron-core computes in a function, and for the
            loss.
        parameters: its own parameters by name, without those of nested submodules.
    """

    fqn: str
    kind: str
    module: nn.Module | None
    parameters: dict[str, nn.Parameter]

    @property
    def layer(self) -> int | None:
        """Index of the submodule's layer in the whole pipeline; None for the loss."""
        return None if self.kind == LOSS else int(self.fqn.split(".", 1)[0])


def list_submodules(stage: Any) -> list[Submodule]:
    """Every submodule of this rank's stage, in the order of its forward pass.

    Tied embeddings: the parameter belongs to the embedding on the first stage, and to the output on another last stage.

    Args:
        stage: the ``GPTPipeline``.

    Raises:
        ConfigError: the submodules are Transformer Engine's, whose own results cannot be observed.
    """
    found: list[Submodule] = []
    owned: set[int] = set()
    for index, layer in enumerate(stage.forward_funcs, start=stage._local_start):
        for name, kind, module in _parts(layer):
            parameters = {}
            holder = layer.args[0].word_embeddings if isinstance(layer, functools.partial) else module
            if holder is not None and kind != POSITIONS:
                parameters = dict(holder.named_parameters(recurse=False))
            elif kind == POSITIONS:
                parameters = {key.removeprefix("positions."): value for key, value in module.named_parameters()}
            parameters = {key: value for key, value in parameters.items() if id(value) not in owned}
            owned.update(map(id, parameters.values()))
            found.append(Submodule(f"{index}.{name}", kind, module, parameters))
    if stage.loss_fn is not None and stage._local_stop == stage._num_layers:
        found.append(Submodule(LOSS_FQN, LOSS, None, {}))
    missing = {name for name, value in stage.named_parameters() if id(value) not in owned}
    if missing:
        raise RuntimeError(f"parameters of no submodule in the catalogue: {', '.join(sorted(missing))}")
    return found


def _parts(layer: Any) -> Iterator[tuple[str, str, Any]]:
    """(name in the layer, kind, module) of one entry of the pipeline."""
    if isinstance(layer, functools.partial):  # the tied output
        yield OUTPUT, HEAD, layer.args[0].output
    elif isinstance(layer, WordEmbedding):
        yield WORD_EMBEDDINGS, EMBEDDING, layer.word_embeddings
    elif isinstance(layer, PositionEmbedding):
        yield POSITION_EMBEDDING, POSITIONS, layer
    elif isinstance(layer, TransformerBlock):
        if layer.context.backend != "torch":
            raise ConfigError(
                f"megasdc.model.backend is {layer.context.backend}: results of its submodules cannot be observed; "
                'set it to "torch", or configure no traces and faults'
            )
        for name, kind in BLOCK_PARTS.items():
            module = None if kind == ACTIVATION else _get(layer.layer, name)
            if kind == ACTIVATION or (module is not None and not type(module).__name__.startswith("Identity")):
                yield f"layer.{name}", kind, module
    elif isinstance(layer, FinalNorm):
        yield LAST_NORM, FINAL_NORM, layer.norm
    elif isinstance(layer, OutputLayer):
        yield OUTPUT, HEAD, layer.output
    else:
        raise RuntimeError(f"a pipeline layer of type {type(layer).__name__} is not in the catalogue")


def _get(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


class Attachment:
    """Hooks on submodules of a stage; ``close`` removes them all.

    Args:
        stage: the ``GPTPipeline``.
        submodules: those to observe, from ``list_submodules``.
        emit: called with every result. A returned value overwrites a forward result in place; in backward and for
            weight gradients it replaces the result.
        gradients: whether to observe backward results and weight gradients too.
    """

    def __init__(self, stage: Any, submodules: list[Submodule], emit: Emit, gradients: bool = True) -> None:
        self._undo = ExitStack()
        self._emit = emit
        self._gradients = gradients
        for submodule in submodules:
            if submodule.kind == LOSS:
                self._attach_loss(stage.loss_fn)
            elif submodule.kind == ACTIVATION:
                block = stage.forward_funcs[int(submodule.fqn.split(".")[0]) - stage._local_start]
                self._attach_activation(submodule.fqn, block.layer.mlp)
            else:
                self._attach_module(submodule)
        for submodule in submodules if gradients else ():
            for slot, parameter in submodule.parameters.items():
                self._on_weight_gradient(submodule.fqn, slot, parameter)

    def close(self) -> None:
        """Remove all hooks and restore the stage."""
        self._undo.close()

    def _attach_module(self, submodule: Submodule) -> None:
        fqn, module = submodule.fqn, submodule.module
        assert module is not None, "only activation and loss have no module"
        if submodule.kind in _ROW:
            self._observe_row(fqn, module)
        else:
            self._register(module.register_forward_hook(lambda _m, _a, out: self._forward(fqn, "output", _first(out))))
        if submodule.kind == EMBEDDING or not self._gradients:  # token ids have no gradient
            return
        if submodule.kind in _COLUMN:
            self._move_column_collective(module)
        slots = ("query", "key", "value") if submodule.kind == CORE_ATTENTION else ("input",)
        self._register(module.register_forward_pre_hook(lambda _m, args: self._tap_inputs(fqn, slots, args)))

    def _attach_loss(self, loss: Any) -> None:
        loss.observe = lambda slot, value: self._forward(LOSS_FQN, slot, value)
        if self._gradients:
            loss.tap = lambda logits: self._tap(LOSS_FQN, "input", logits)

        def restore() -> None:
            loss.observe = loss.tap = None

        self._undo.callback(restore)

    def _attach_activation(self, fqn: str, mlp: Any) -> None:
        """Observe an activation: its result is FC2's input; the gradient of its input is that of FC1's output."""
        self._register(mlp.linear_fc2.register_forward_pre_hook(lambda _m, args: self._forward(fqn, "output", args[0])))
        if not self._gradients:
            return
        self._register(
            mlp.linear_fc1.register_forward_hook(lambda _m, _a, out: (self._tap(fqn, "input", out[0]), *out[1:]))
        )

    def _forward(self, fqn: str, slot: str, result: Tensor) -> None:
        value = self._emit(FORWARD, fqn, slot, result.detach())
        if value is not None:
            result.data.copy_(value)

    def _observe_row(self, fqn: str, module: Any) -> None:
        local = module._forward_impl

        def observed(*args: Any, **options: Any) -> Tensor:
            result = local(*args, **options)
            self._forward(fqn, "output", result)
            return result

        module._forward_impl = observed
        self._undo.callback(delattr, module, "_forward_impl")

    def _move_column_collective(self, module: Any) -> None:
        """Move the sum of input gradients out of the linear layer; ``_tap_inputs`` must be registered after it."""
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
        )

        before = {
            name: getattr(module, name)
            for name in ("allreduce_dgrad", "sequence_parallel", "disable_grad_reduce")
            if hasattr(module, name)
        }
        if before["sequence_parallel"]:
            outside = gather_from_sequence_parallel_region
        elif before["allreduce_dgrad"]:
            outside = copy_to_tensor_model_parallel_region
        else:
            return
        module.allreduce_dgrad = module.sequence_parallel = False
        if "disable_grad_reduce" in before:
            module.disable_grad_reduce = True
        self._undo.callback(vars(module).update, before)
        self._register(module.register_forward_pre_hook(lambda _m, args: (outside(args[0]), *args[1:])))

    def _tap_inputs(self, fqn: str, slots: tuple[str, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        tapped = list(args)
        for place, slot in enumerate(slots):
            value = args[place]
            if isinstance(value, tuple):  # (branch, bias) of a residual sum
                tapped[place] = (self._tap(fqn, slot, value[0]), *value[1:])
            else:
                tapped[place] = self._tap(fqn, slot, value)
        return tuple(tapped)

    def _tap(self, fqn: str, slot: str, value: Tensor) -> Tensor:
        return tap_gradient(value, lambda gradient: self._emit(BACKWARD, fqn, slot, gradient))

    def _on_weight_gradient(self, fqn: str, slot: str, parameter: nn.Parameter) -> None:
        self._register(parameter.register_hook(lambda gradient: self._emit(WEIGHT_GRAD, fqn, slot, gradient.detach())))

    def _register(self, handle: Any) -> None:
        self._undo.callback(handle.remove)


def tap_gradient(value: Tensor, emit: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Return the same value; ``emit`` is called with its gradient, and returns None or a gradient to use instead."""
    tapped: Tensor = _GradientTap.apply(value, emit)
    return tapped


class _GradientTap(torch.autograd.Function):
    """Identity whose backward emits the gradient and uses the returned value, if any, in its place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, emit: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.emit = emit
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        answer = ctx.emit(gradients[0])
        return (gradients[0] if answer is None else answer), None


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


OnInputs = Callable[[str, str, list[Tensor]], None]
"""Function of (phase, fqn, tensors); phase is forward, also in recomputation, or backward."""


class Named(Protocol):
    """A submodule with its full dotted name; ``module`` None: no module computes it."""

    @property
    def fqn(self) -> str:
        """Full dotted name."""

    @property
    def module(self) -> Any:
        """The module that computes it; None: no module does."""


class InputProbe:
    """Hooks that report every submodule's inputs; ``close`` removes them all.

    Forward inputs are its arguments, the backward input is the gradient of its output. Activation and loss, which are
    not modules, are not reported: their input is the result of the submodule before them.

    Args:
        submodules: such as those of ``list_submodules``.
    """

    def __init__(self, submodules: Iterable[Named], show: OnInputs) -> None:
        self._undo = ExitStack()
        self._show = show
        for submodule in submodules:
            if submodule.module is not None:
                self._attach(submodule.fqn, submodule.module)

    def close(self) -> None:
        """Remove all hooks; idempotent."""
        self._undo.close()

    def __enter__(self) -> InputProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(self, fqn: str, module: Any) -> None:
        before = module.register_forward_pre_hook(lambda _m, args: self._show(FORWARD, fqn, list(_tensors(args))))
        self._undo.callback(before.remove)
        self._undo.callback(module.register_forward_hook(lambda _m, _a, out: self._await_gradient(fqn, out)).remove)

    def _await_gradient(self, fqn: str, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._show(BACKWARD, fqn, [gradient]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
