"""Partial backward passes: ended between transformer layers, with the gradients of the layers done kept.

Autograd computes nodes in the reverse of the order in which they were made, and accumulates a parameter's gradient as
soon as it is whole. So when the gradient of a layer's input is whole, the parameters of that layer and of those after
it have theirs, and nothing of the layers before has been computed: a hook there lies between layers, whatever a layer
is made of. Where activations are recomputed, the hook is on the input of what is recomputed together, outside of it:
nothing is recomputed for a layer that is not done.

The hook ends the pass by an exception. Passing no gradient on would not end it: a function in Python, such as a
recomputed layer, then gets zeros, and computes as before. What DeepSpeed does after a backward pass is done by the
engine, which also gives zeros to parameters that no pass has reached, since all ranks must reduce the same ones.

A parameter with several uses, such as tied embeddings, is accumulated by autograd once all its gradients have come: the
pass has reached it where it has reached its first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from megasdc.model.gpt import TransformerBlock

GoesOn = Callable[[int, int], bool]
"""Function of (micro-batch, transformer layers done, from the last one): whether its backward pass goes on."""


class _EndedError(Exception):
    """Ends a backward pass; ``layers``: transformer layers that are done."""

    def __init__(self, layers: int) -> None:
        super().__init__(f"a backward pass was ended after {layers} transformer layers, outside of its engine")
        self.layers = layers


class PartialBackward:
    """Hooks on the inputs of the transformer layers and of the final norm; ``close`` removes them.

    Args:
        stage: the ``GPTPipeline``, with all layers of the model and no tensor parallelism.
        goes_on: called between layers of a pass that may be ended.

    Attributes:
        num_layers: transformer layers of the model.
    """

    def __init__(self, stage: Any, goes_on: GoesOn) -> None:
        self.goes_on = goes_on
        self._stage = stage
        self._marks = False
        self._entered: Tensor | None = None
        self._decide: Callable[[int], bool] | None = None
        layers = list(stage.forward_funcs)
        blocks = [place for place, layer in enumerate(layers) if isinstance(layer, TransformerBlock)]
        self.num_layers = len(blocks)
        self._needs: dict[int, int] = {}
        self._hooks = []
        for place, layer in enumerate(layers):
            # The tied output is a function of the embedding.
            module: nn.Module = layer.args[0] if isinstance(layer, functools.partial) else layer
            done = sum(block >= place for block in blocks)
            needs = done if place >= blocks[0] else self.num_layers + 1
            for parameter in module.parameters():
                self._needs[id(parameter)] = max(needs, self._needs.get(id(parameter), 0))
            if blocks[0] <= place <= blocks[-1] + 1:
                self._hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, done)))
        self._recompute = stage.activation_checkpoint_func
        if self._recompute is not checkpointing.non_reentrant_checkpoint:  # whose outputs are the layers' own
            stage.activation_checkpoint_func = self._enter_recomputed

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._stage.activation_checkpoint_func = self._recompute

    def needs(self, parameter: Tensor) -> int:
        """Transformer layers that must be done for a parameter to have its gradient; one more than all: a whole pass.

        0: every backward pass reaches it.
        """
        return self._needs[id(parameter)]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of a forward pass whose backward pass may be ended."""
        self._marks = True
        try:
            yield
        finally:
            self._marks, self._entered = False, None

    def backward(self, backward: Callable[[], None], goes_on: Callable[[int], bool]) -> int | None:
        """Run a backward pass; returns the transformer layers after which it was ended, None where it is whole."""
        self._decide = goes_on
        try:
            backward()
        except _EndedError as ended:
            return ended.layers
        finally:
            self._decide = None
        return None

    def _enter_recomputed(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        self._entered = inputs[0]
        return self._recompute(function, *inputs)

    def _enter(self, done: int, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Put a hook on a layer's input, or on that of the layers with which it will be recomputed."""
        hidden = inputs[0] if self._entered is None else self._entered
        self._entered = None
        if self._marks and hidden.grad_fn is not None:
            hidden.register_hook(lambda _gradient: self._between(done))

    def _between(self, done: int) -> None:
        if self._decide is not None and not self._decide(done):
            raise _EndedError(done)
