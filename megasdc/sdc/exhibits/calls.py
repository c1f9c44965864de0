"""Calls of submodules that are kept, and what an exhibit is.

A result is a matrix: rows are tokens, or those of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from megasdc.model.layers import PositionEmbedding
from megasdc.model.modules import ResidualAdd, TorchAttention, hidden_masks
from megasdc.sdc.fp64.bounds import Exact

LOCAL = "_forward_impl"
"""Method of Megatron-core's parallel linear layers that computes this rank's own part."""
METHODS = (LOCAL, "per_token", "forward")
"""Methods whose calls are seen, of which a module has the first: ``per_token`` is the loss's."""


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Args:
        module: the submodule's.
        args: positional arguments, those of linear layers by name included.
        output: None: it is no tensor.
        gradients: of the output, once there is one.
        received: gradients of what it was given, once there is one.
        mask: of dropout, scaled, as the output, of attention as its weights, [b, n, s, s]; None: nothing is dropped.
    """

    module: Any
    args: tuple[Any, ...]
    output: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    mask: Tensor | None = None


@dataclass(frozen=True)
class Exhibit:
    """A result that can be computed again.

    Args:
        result: [R, C].
        factors: what it was made of, which is equal on all ranks that are compared.
        compute: elements in fp64, from their rows [n] and columns [n].
        is_product: ``factors`` are left [R, K], right [C, K] and, if there is one, bias [C]: left right^T + bias.
    """

    result: Tensor
    factors: tuple[Tensor, ...]
    compute: Callable[[Tensor, Tensor], Exact]
    is_product: bool = False


@contextmanager
def kept_calls(module: Any, seen: list[Call] | None = None) -> Iterator[list[Call]]:
    """Inside, calls of a module are kept, in their order; None: nothing is.

    Args:
        seen: to which they are added, with tensors as they are, which is enough as long as nothing changes them; None:
            a new list, with copies.
    """
    calls, copies = ([], True) if seen is None else (seen, False)
    if module is None:
        yield calls
        return
    name = next(one for one in METHODS if hasattr(module, one))
    own, was = getattr(module, name), vars(module).get(name)

    def kept(*args: Any, **options: Any) -> Any:
        given = (*args, *(options.get(one) for one in ("input", "weight", "bias"))) if name == LOCAL else args
        place, call = len(calls), Call(module, tuple(_detached(one, copies) for one in given))
        calls.append(call)  # before, since a listener may be called inside
        inputs = options.get("input", args[0] if args else None)
        if copies and isinstance(inputs, Tensor) and inputs.requires_grad:
            inputs.register_hook(lambda gradient: call.received.append(_detached(gradient, copies)))
        output = own(*args, **options)
        if isinstance(output, Tensor):
            calls[place] = replace(call, output=output.detach(), mask=_mask_of(module, args))
            if output.requires_grad:
                output.register_hook(lambda gradient: call.gradients.append(_detached(gradient, copies)))
        return output

    setattr(module, name, kept)
    try:
        yield calls
    finally:
        if was is None:
            delattr(module, name)
        else:
            setattr(module, name, was)


def _detached(value: Any, copies: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_detached(one, copies) for one in value)
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    return value.detach().clone() if copies else value.detach()


def _mask_of(module: Any, args: Sequence[Any]) -> Tensor | None:
    if isinstance(module, PositionEmbedding):
        return module.mask(args[0])
    if isinstance(module, TorchAttention):
        return module.masks(args[0].permute(1, 2, 0, 3)) if module.training and module.dropout > 0 else None
    if not isinstance(module, ResidualAdd) or not module.training or not args[2]:
        return None
    return hidden_masks(module.streams, args[0][0], args[2], module.layer_number, module.site, module.sequence_shard)


def rows_of(tensor: Tensor) -> Tensor:
    """As a matrix: the last dimension is that of its columns."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def taken(tensor: Tensor, *places: Tensor) -> Tensor:
    """Elements, or rows, on the host."""
    return tensor.detach()[tuple(one.to(tensor.device) for one in places)].cpu()
