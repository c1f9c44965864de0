"""Calls of submodules that are kept, and what an exhibit is.

A result is a matrix: rows are tokens, or those of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.common.addresses import FORWARD, RECOMPUTE, Address
from megasdc.determinism import capture_rng
from megasdc.model.layers import PositionEmbedding
from megasdc.model.modules import ResidualAdd, TorchAttention, hidden_masks
from megasdc.sdc.fp64.rounding_bounds import Exact
from megasdc.sdc.verdict import OWN_CODE, REFEREE
from megasdc.tensors.nested import map_in, tensors_in

LOCAL = "_forward_impl"
"""Method of Megatron-core's parallel linear layers that computes this rank's own part."""
METHODS = (LOCAL, "per_token")
"""Methods whose calls are seen in place of ``forward``, where a module has them by a class of ``OWNERS``: ``per_token``
is the loss's."""
OWNERS = ("megasdc", "megatron")


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Args:
        module: the submodule's.
        args: positional arguments, those of linear layers by name included.
        options: arguments by name, of others than linear layers.
        output: the first tensor of it; None: there is none.
        gradients: of the output, once there is one.
        received: gradients of what it was given, once there is one.
        mask: of dropout, scaled, as the output, of attention as its weights, [b, n, s, s]; None: nothing is dropped.
        chance: state of random generators when it began, where calls are copied.
        autocast: type of automatic mixed precision; None: it was off.
    """

    module: Any
    args: tuple[Any, ...]
    output: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    mask: Tensor | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    chance: Mapping[str, Any] | None = None
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Trust:
    """How results are judged by bounds.

    Args:
        basis: of rulings.
        inner: times the bound: what a right result is off by at most.
        outer: times the bound: what a wrong one is off by at least, in some element.
        compared: whether elements that agree are to be within ``inner`` times their bounds, too.
        alone: in place of ``outer`` where too few of those tell anything.
    """

    basis: str
    inner: float = 1.0
    outer: float = 1.0
    compared: bool = False
    alone: float = 1.0


PROVED = Trust(REFEREE)
"""A sum, or function, that is known, and a bound that is proved."""
LIKELY = Trust(REFEREE, 1.0, 4.0, compared=True, alone=math.inf)
"""A bound that is proved, of what a submodule seems to compute by its structure: two right results of another function
are at most two bounds apart, so that none is outside of four where the other is within one.
"""
ESTIMATED = Trust(OWN_CODE, 8.0, 32.0, compared=True, alone=math.inf)
"""A submodule's own code in fp64, and an estimate of what rounding makes of it."""


def estimated(kind: torch.dtype) -> Trust:
    """The trust in an estimate for a type: where ranks agree on nothing, a wrong result is outside of what bf16, which
    the code of one of them may have had on the way, makes of it.
    """
    coarser = torch.finfo(torch.bfloat16).eps / torch.finfo(kind).eps
    return replace(ESTIMATED, alone=max(ESTIMATED.outer, ESTIMATED.inner * coarser))


@dataclass(frozen=True)
class Exhibit:
    """A result that can be computed again.

    Args:
        result: [R, C].
        factors: what it was made of, which is equal on all ranks that are compared.
        compute: elements in fp64, from their rows [n] and columns [n].
        is_product: ``factors`` are left [R, K], right [C, K] and, if there is one, bias [C]: left right^T + bias.
        trust: how far what it was taken for, and its bounds, are to be believed.
        held: names of the last of ``factors``: parameters and buffers of the submodule.
    """

    result: Tensor
    factors: tuple[Tensor, ...]
    compute: Callable[[Tensor, Tensor], Exact]
    is_product: bool = False
    trust: Trust = PROVED
    held: tuple[str, ...] = ()


@contextmanager
def kept_calls(module: Any, seen: list[Call] | None = None) -> Iterator[list[Call]]:
    """Inside, calls of a module are kept, in their order; None: nothing is.

    Args:
        seen: to which they are added, with tensors as they are, which is enough as long as nothing changes them, and
            with gradients that come later; None: a new list, with copies, and with those that come inside.
    """
    calls, copies = ([], True) if seen is None else (seen, False)
    if module is None:
        yield calls
        return
    name = _method_of(module)
    own, was = getattr(module, name), vars(module).get(name)
    hooks: list[Any] = []

    def when_known(tensor: Tensor, gradients: list[Tensor]) -> None:
        if tensor.requires_grad:
            hook = tensor.register_hook(lambda gradient: gradients.append(_detached(gradient, copies)))
            hooks.extend([hook] if copies else [])  # else the gradient may come after calls are kept no more

    def kept(*args: Any, **options: Any) -> Any:
        given = (*args, *(options.get(one) for one in ("input", "weight", "bias"))) if name == LOCAL else args
        place, call = len(calls), Call(module, tuple(_detached(one, copies) for one in given))
        if copies:
            named = {} if name == LOCAL else {key: _detached(one, copies) for key, one in options.items()}
            call = replace(call, options=named, chance=capture_rng(), autocast=_autocast((given, named)))
        calls.append(call)  # before, since a listener may be called inside
        inputs = options.get("input", args[0] if args else None)
        if copies and isinstance(inputs, Tensor):
            when_known(inputs, call.received)
        output = own(*args, **options)
        first = next(tensors_in(output), None)
        if first is not None:
            calls[place] = replace(call, output=first.detach(), mask=_mask_of(module, args))
            when_known(first, call.gradients)
        return output

    setattr(module, name, kept)
    try:
        yield calls
    finally:
        for hook in hooks:  # those of a parameter would stay for as long as it does
            hook.remove()
        if was is None:
            delattr(module, name)
        else:
            setattr(module, name, was)


def _method_of(module: Any) -> str:
    """The method whose calls are seen: a user's module may have others of the same names."""
    for name in METHODS:
        made_by = next((one.__module__ for one in type(module).__mro__ if name in vars(one)), "")
        if made_by.partition(".")[0] in OWNERS:
            return name
    return "forward"


def _detached(value: Any, copies: bool) -> Any:
    def apart(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        return tensor.detach().clone() if copies else tensor.detach()

    return map_in(Tensor, value, apart)


def _autocast(given: Any) -> torch.dtype | None:
    """Type of automatic mixed precision that is on, on the device of what a submodule is given."""
    kind = next((one.device.type for one in tensors_in(given)), "cpu")
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _mask_of(module: Any, args: Sequence[Any]) -> Tensor | None:
    if isinstance(module, PositionEmbedding):
        return module.mask(args[0])
    if isinstance(module, TorchAttention):
        return module.masks(args[0].permute(1, 2, 0, 3)) if module.training and module.dropout > 0 else None
    if not isinstance(module, ResidualAdd) or not module.training or not args[2]:
        return None
    return hidden_masks(module.streams, args[0][0], args[2], module.layer_number, module.site, module.sequence_shard)


def one_call(address: Address, calls: Sequence[Call]) -> Call | str:
    """The call that a result is of; a text: there is none, or it may be of several."""
    if "#" in address.slot:
        return "it is computed several times in a micro-batch"
    if address.phase == FORWARD:
        some = list(calls[:1])
    elif address.phase == RECOMPUTE:
        some = list(calls[1:])
    else:
        some = [one for one in calls if one.gradients]
    if len(some) != 1:
        return "it is computed several times in a micro-batch" if some else "what it was made of was not seen"
    if some[0].output is None or next(tensors_in((some[0].args, some[0].options)), None) is None:
        return "it is given, or returns, no tensor"
    return some[0]


def rows_as_matrix(tensor: Tensor) -> Tensor:
    """As a matrix: the last dimension is that of its columns."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def taken(tensor: Tensor, *places: Tensor) -> Tensor:
    """Elements, or rows, on the host."""
    return tensor.detach()[tuple(one.to(tensor.device) for one in places)].cpu()
