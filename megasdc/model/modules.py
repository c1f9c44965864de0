"""megasdc's own modules inside Megatron-core's transformer layer.

They replace modules that need CUDA or whose dropout masks depend on the layout: attention on PyTorch's scaled dot
product, norms for sequence parallelism, and the residual sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasdc.model.randomness import DropoutStreams

SITE_EMBEDDING, SITE_ATTENTION_RESIDUAL, SITE_MLP_RESIDUAL, SITE_HEADS = 0, 1, 2, 16
"""Numbers of the dropout sites of a layer; attention head i uses SITE_HEADS + i."""


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose input gradient is summed up before autograd adds it to that of the residual path.

    On a CPU PyTorch computes RMSNorm in several operations, whose gradients autograd would otherwise add one by one;
    observing the gradient would then change the order of the sum.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        return super().forward(x.view_as(x))


class Norm:
    """Creates a LayerNorm or RMSNorm whose parameters are marked if their gradients need a sum over tensor ranks.

    With sequence parallelism each tensor rank normalises its own part of the sequence, so a norm's gradient is a
    partial sum; the engine adds these. A class, because Megatron-core instantiates classes with its own keyword
    arguments but uses functions unchanged.
    """

    kinds: ClassVar[dict[str, Callable[..., nn.Module]]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": RMSNorm}

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        """The norm of ``config.normalization`` over the last dimension, [hidden_size]."""
        norm = cls.kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class HeadNorm(Norm):
    """Creates the norm of queries or keys; each tensor rank applies it to its own heads: gradients are partial sums."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> nn.Module:  # type: ignore[misc]
        """The norm over the last dimension, [hidden_size], the width of one head."""
        norm = super().__new__(cls, config, hidden_size, eps, **options)
        for parameter in norm.parameters():
            parameter.partial_over_tensor = config.tensor_model_parallel_size > 1  # type: ignore[attr-defined]
        return norm


class TorchAttention(nn.Module):
    """Causal attention on ``torch.nn.functional.scaled_dot_product_attention``, after rotating queries and keys.

    With attention dropout the probabilities are materialised, [b, n/tp, s, s], because the fused kernels draw masks
    that depend on the number of heads per rank.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.dropout = config.attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.streams: DropoutStreams | None = None
        self.tp_rank = 0
        self.rotation: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.rotate: Callable[..., tuple[Tensor, Tensor]] = rotate

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """Attend causally: query [s, b, n/tp, d], key and value [s, b, g/tp, d] -> [s, b, h/tp]; the mask is None."""
        if attention_mask is not None:
            raise ValueError("attention is causal; no other mask is supported")
        s, b = query.shape[:2]
        if self.rotation is not None:
            cosine, sine = self.rotation(query)
            query, key = self.rotate(query, key, cosine, sine)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.training and self.dropout > 0:
            out = self._with_dropout(q, k, v)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=k.shape[1] != q.shape[1]
            )
        return out.permute(2, 0, 1, 3).reshape(s, b, -1)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, s = q.shape[1], q.shape[2]
        repeats = n // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        probabilities = scores.masked_fill_(future, float("-inf")).softmax(-1).to(q.dtype)
        return (probabilities * self.masks(q)) @ v

    def masks(self, q: Tensor) -> Tensor:
        """Dropout's masks of the probabilities, scaled, [b, n/tp, s, s], for queries [b, n/tp, s, d]."""
        if self.streams is None:
            raise RuntimeError("attention dropout needs dropout streams")
        n, s = q.shape[1], q.shape[2]
        first = self.tp_rank * n
        masks = [
            self.streams.keep_masks((s, s), self.dropout, self.layer_number, SITE_HEADS + first + head, q)
            for head in range(n)
        ]
        return torch.stack(masks, 1)


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding, halves not interleaved, of query [s, b, n, d] and key [s, b, g, d]; returns both.

    Cosine and sine are [s, 1, 1, d]; the sine's first half is negated.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864).
    """
    half = cosine.shape[-1] // 2
    q, k = (torch.addcmul(x * cosine, x.roll(half, -1), sine) for x in (query, key))
    return q, k


def residual_sum(x: Tensor, bias: Tensor | None, mask: Tensor | None, residual: Tensor) -> Tensor:
    """``residual + mask (x + bias)``, [s, b, h]; without bias or mask if they are None."""
    if bias is not None:
        x = x + bias
    return residual + (x if mask is None else x * mask)


class ResidualAdd(nn.Module):
    """``residual + dropout(x + bias)`` with masks that do not depend on the layout.

    A module, so that its result can be observed. Called by Megatron-core's layer as
    ``bda(training, fusion)(x_with_bias, residual, prob)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: DropoutStreams | None = None
        self.layer_number = 0
        self.site = 0
        self.sequence_shard = (0, 1)
        self.sum: Callable[..., Tensor] = residual_sum

    def __call__(self, training: bool, fusion: bool) -> Callable[..., Tensor]:
        """The module's own call; Megatron-core's ``training`` and ``fusion`` are ignored."""
        return super().__call__

    def forward(self, x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        """Add the bias [h] (or None), drop out with ``prob``, add the residual: [s, b, h] or [s/tp, b, h], all."""
        x, bias = x_with_bias
        mask = None
        if self.training and prob > 0:
            mask = hidden_masks(self.streams, x, prob, self.layer_number, self.site, self.sequence_shard)
        return self.sum(x, bias, mask, residual)


def hidden_masks(
    streams: DropoutStreams | None, x: Tensor, prob: float, layer: int, site: int, shard: tuple[int, int]
) -> Tensor:
    """Dropout masks for hidden states x, [s/parts, b, h], scaled by 1 / (1 - prob).

    With sequence parallelism every tensor rank draws the mask of the whole sequence and uses its own part: ``shard`` is
    the number of x's part and the number of parts. ``site``: number of the dropout site in the layer.
    """
    if streams is None:
        raise RuntimeError("dropout needs dropout streams")
    part, parts = shard
    s, _b, h = x.shape
    masks = streams.keep_masks((s * parts, h), prob, layer, site, x)
    return masks[:, part * s : (part + 1) * s].transpose(0, 1)
