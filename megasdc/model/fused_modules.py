"""Modules of a transformer layer whose functions are compiled (``model.fuse``).

Each one computes the same as its module without fusion, so that observers and fault injection find every submodule's
result in the same place.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, ClassVar

from torch import Tensor, nn

from megasdc.model import fused
from megasdc.model.modules import HeadNorm, Norm, ResidualAdd, TorchAttention, residual_sum


class FusedRMSNorm(nn.RMSNorm):
    """RMSNorm by ``fused.rms_norm``."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        return fused.rms_norm(self.eps)(x, self.weight)  # type: ignore[no-any-return, arg-type]


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm by ``fused.layer_norm``."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        return fused.layer_norm(self.eps)(x, self.weight, self.bias)  # type: ignore[no-any-return]


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
            module.rotate = fused.rotate
        elif isinstance(module, ResidualAdd):
            module.sum = _sum
    mlp: Any = layer.mlp
    config = mlp.config
    mlp.fused_activation = fused.activation(
        config.activation_func,
        config.gated_linear_unit,
        getattr(config, "activation_func_clamp_value", None),
        getattr(config, "glu_linear_offset", 0.0),
    )
    mlp.forward = MethodType(_mlp, mlp)


def _sum(x: Tensor, bias: Tensor | None, mask: Tensor | None, residual: Tensor) -> Tensor:
    """Residual sum, not compiled for two operands, which is one pass already."""
    if bias is None and mask is None:
        return residual_sum(x, bias, mask, residual)
    return fused.residual_sum(x, bias, mask, residual)  # type: ignore[no-any-return]


def _mlp(self: Any, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
    """Megatron-core's ``MLP.forward`` for dense models: hidden [s, b, h] -> the branch and fc2's bias."""
    x, bias = self.linear_fc1(hidden)
    return self.linear_fc2(self.fused_activation(x, bias))  # type: ignore[no-any-return]
