"""Calls of submodules that are kept, and what an exhibit is.

A result is a matrix: rows are tokens, or those of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megasdc.model.modules import ResidualAdd, hidden_masks
from megasdc.sdc.fp64.bounds import Exact

LOCAL = "_forward_impl"
"""Method of Megatron-core's parallel linear layers that computes this rank's own part."""


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Args:
        module: the submodule's.
        args: positional arguments, those of linear layers by name included.
        output: None: it is no tensor.
        gradients: of the output, once there is one.
        mask: of dropout, scaled, as the output; None: nothing is dropped.
    """

    module: Any
    args: tuple[Any, ...]
    output: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    mask: Tensor | None = None


@dataclass(frozen=True)
class Exhibit:
    """A result that can be computed again.

    Args:
        result: [R, C].
        factors: what it was made of, which is equal on all ranks that are compared.
        compute: elements in fp64, from their rows [n] and columns [n].
    """

    result: Tensor
    factors: tuple[Tensor, ...]
    compute: Callable[[Tensor, Tensor], Exact]


@contextmanager
def kept_calls(module: Any) -> Iterator[list[Call]]:
    """Inside, calls of a module are kept, in their order; None: nothing is."""
    calls: list[Call] = []
    if module is None:
        yield calls
        return
    name = LOCAL if hasattr(module, LOCAL) else "forward"
    own, was = getattr(module, name), vars(module).get(name)

    def kept(*args: Any, **options: Any) -> Any:
        output = own(*args, **options)
        given = (*args, *(options.get(one) for one in ("input", "weight", "bias"))) if name == LOCAL else args
        own_result = output.detach() if isinstance(output, Tensor) else None
        call = Call(module, tuple(map(_detached, given)), own_result, mask=_mask_of(module, args))
        calls.append(call)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: call.gradients.append(gradient.detach().clone()))
        return output

    setattr(module, name, kept)
    try:
        yield calls
    finally:
        if was is None:
            delattr(module, name)
        else:
            setattr(module, name, was)


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_detached, value))
    return value.detach().clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value


def _mask_of(module: Any, args: Sequence[Any]) -> Tensor | None:
    if not isinstance(module, ResidualAdd) or not module.training or not args[2]:
        return None
    return hidden_masks(module.streams, args[0][0], args[2], module.layer_number, module.site, module.sequence_shard)


def rows_of(tensor: Tensor) -> Tensor:
    """As a matrix: the last dimension is that of its columns."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def taken(tensor: Tensor, *places: Tensor) -> Tensor:
    """Elements, or rows, on the host."""
    return tensor.detach()[tuple(one.to(tensor.device) for one in places)].cpu()
