"""Fused functions of the model with their gradients: norms, activation, rotation, residual sum; and their modules.

Forward and backward are each one compiled function; the backward recomputes what it needs from the forward's arguments,
so that no intermediate results are kept. Internal computations are in fp32 whatever the type of the arguments.

The modules of a transformer layer that use them (``model.fuse``) compute the same as those without fusion, so that
observers and fault injection find every submodule's result in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megasdc.model import modules
from megasdc.model.compiled import Compiled
from megasdc.model.modules import HeadNorm, Norm, ResidualAdd, TorchAttention


class Fused:
    """A function of tensors, with its gradient; it takes tensors or None and returns one tensor or several."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        self.function = function
        self.forward = Compiled(self._forward, function.__name__)
        self._backwards: dict[tuple[bool, ...], Compiled] = {}

    def __call__(self, *args: Tensor | None) -> Any:
        """Apply the function, with gradients."""
        return _Apply.apply(self, *args)

    def backward(self, wanted: tuple[bool, ...]) -> Compiled:
        """The compiled function (gradients of the results, arguments) -> gradients of the arguments ``wanted``."""
        if wanted not in self._backwards:
            self._backwards[wanted] = Compiled(
                partial(self._gradients, wanted), f"the gradient of {self.function.__name__}"
            )
        return self._backwards[wanted]

    def _forward(self, *args: Tensor | None) -> Sequence[Tensor]:
        result = self.function(*args)
        return (result,) if isinstance(result, Tensor) else result

    def _gradients(self, wanted: tuple[bool, ...], *tensors: Any) -> Sequence[Tensor]:
        results, args = tensors[: -len(wanted)], tensors[-len(wanted) :]
        with torch.enable_grad():
            leaves: list[Any] = [
                a if a is None else a.detach().requires_grad_(w) for a, w in zip(args, wanted, strict=True)
            ]
            outputs = self._forward(*leaves)
            inputs = [leaf for leaf, w in zip(leaves, wanted, strict=True) if w]
            return torch.autograd.grad(outputs, inputs, results)


class _Apply(torch.autograd.Function):
    """Runs a ``Fused``."""

    @staticmethod
    def forward(ctx: Any, fused: Fused, *args: Tensor | None) -> Any:
        ctx.fused = fused
        ctx.save_for_backward(*args)
        results = fused.forward(*args)
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        results = [gradient.contiguous() for gradient in gradients]
        found = iter(ctx.fused.backward(wanted)(*results, *ctx.saved_tensors))
        return None, *(next(found) if w else None for w in wanted)


@cache
def rms_norm(eps: float) -> Fused:
    """RMSNorm over the last dimension: (x [..., h], weight [h]) -> [..., h]; ``eps`` is added to the mean square."""

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    return Fused(rms_norm)


@cache
def layer_norm(eps: float) -> Fused:
    """LayerNorm over the last dimension: (x [..., h], weight [h], bias [h]) -> [..., h]; ``eps``: added to the
    variance.
    """

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return (centred * scale * weight.float() + bias.float()).to(x.dtype)

    return Fused(layer_norm)


@cache
def activation(
    function: Callable[[Tensor], Tensor], gated: bool = False, clamp: float | None = None, offset: float = 0.0
) -> Fused:
    """Activation between the two linear layers of an MLP: (x [..., f] or [..., 2 f], bias or None) -> [..., f].

    If ``gated``, x is [gate, linear] in its last dimension, and the result function(gate) * (linear + ``offset``);
    ``clamp`` bounds linear on both sides and gate from above, None: no bound.
    """

    def activation(x: Tensor, bias: Tensor | None) -> Tensor:
        wide = x.float() if bias is None else x.float() + bias.float()
        if not gated:
            return function(wide).to(x.dtype)
        gate, linear = wide.chunk(2, -1)
        if clamp is not None:
            gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
        return (function(gate) * (linear + offset)).to(x.dtype)

    return Fused(activation)


def _rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, ...]:
    half = cosine.shape[-1] // 2
    return tuple(
        (x.float() * cosine.float() + torch.cat((x[..., half:], x[..., :half]), -1).float() * sine.float()).to(x.dtype)
        for x in (query, key)
    )


def _residual_sum(x: Tensor, bias: Tensor | None, mask: Tensor | None, residual: Tensor) -> Tensor:
    wide = x.float() if bias is None else x.float() + bias.float()
    return (residual.float() + (wide if mask is None else wide * mask.float())).to(residual.dtype)


rotate = Fused(_rotate)
"""Rotary position embedding of queries and keys: ([s, b, n, d], [s, b, g, d], cosine, sine) -> both rotated."""
residual_sum = Fused(_residual_sum)
"""(x, bias or None, dropout mask or None, residual) -> residual + mask (x + bias)."""


class FusedRMSNorm(nn.RMSNorm):
    """RMSNorm by ``rms_norm``."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        return rms_norm(self.eps)(x, self.weight)  # type: ignore[no-any-return, arg-type]


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm by ``layer_norm``."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        return layer_norm(self.eps)(x, self.weight, self.bias)  # type: ignore[no-any-return]


class FusedNorm(Norm):
    """Makes a compiled norm; see ``Norm``."""

    kinds: ClassVar[Any] = {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}


class FusedHeadNorm(HeadNorm):
    """Makes the compiled norm of queries or keys; see ``HeadNorm``."""

    kinds: ClassVar[Any] = FusedNorm.kinds


def fuse_layer(layer: nn.Module) -> None:
    """Make rotation, residual sums and activation of Megatron-core's layer use compiled functions.

    It must have been built with the modules of ``megasdc.model.modules``.
    """
    for module in layer.modules():
        if isinstance(module, TorchAttention):
            module.rotate = rotate
        elif isinstance(module, ResidualAdd):
            module.sum = _sum
    mlp: Any = layer.mlp
    config = mlp.config
    mlp.fused_activation = activation(
        config.activation_func,
        config.gated_linear_unit,
        getattr(config, "activation_func_clamp_value", None),
        getattr(config, "glu_linear_offset", 0.0),
    )
    mlp.forward = MethodType(_mlp, mlp)


def _sum(x: Tensor, bias: Tensor | None, mask: Tensor | None, residual: Tensor) -> Tensor:
    """Residual sum, not compiled for two operands, which is one pass already."""
    if bias is None and mask is None:
        return modules.residual_sum(x, bias, mask, residual)
    return residual_sum(x, bias, mask, residual)  # type: ignore[no-any-return]


def _mlp(self: Any, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
    """Megatron-core's ``MLP.forward`` for dense models: hidden [s, b, h] -> the branch and fc2's bias."""
    x, bias = self.linear_fc1(hidden)
    return self.linear_fc2(self.fused_activation(x, bias))  # type: ignore[no-any-return]
