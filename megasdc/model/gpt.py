"""GPT models of Megatron-core's modules: embedding, positions, transformer layers, final norm, output.

Each class of a layer is one entry of the pipeline: one tensor in, one tensor out. Hidden states are [s, b, h], or
[s/tp, b, h] with sequence parallelism. Every layer is built under a seed of its own.

Modules of our own stand inside Megatron-core's layer where its own need CUDA or have dropout masks that depend on the
layout: attention on PyTorch's scaled dot product, norms for sequence parallelism, and the residual sum. Those with
fused functions (``model.fuse``) compute the same, so that observers and fault injection find every submodule's result
in the same place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasdc.common.errors import ConfigError
from megasdc.config.deepspeed import large_as_floats
from megasdc.config.model import ModelSection, ffn_width
from megasdc.config.sections import ParallelSection
from megasdc.model import fused
from megasdc.model.randomness import DropoutStreams, seeded_build
from megasdc.parallel.dims import ParallelDims

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


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


class FusedRMSNorm(nn.RMSNorm):
    """RMSNorm by ``rms_norm``."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        return fused.rms_norm(self.eps)(x, self.weight)  # type: ignore[no-any-return, arg-type]


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm by ``layer_norm``."""

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

    It must have been built with the modules of this file.
    """
    for module in layer.modules():
        if isinstance(module, TorchAttention):
            module.rotate = fused.rotate
        elif isinstance(module, ResidualAdd):
            module.sum = _fused_sum
    mlp: Any = layer.mlp
    config = mlp.config
    mlp.fused_activation = fused.activation(
        config.activation_func,
        config.gated_linear_unit,
        getattr(config, "activation_func_clamp_value", None),
        getattr(config, "glu_linear_offset", 0.0),
    )
    mlp.forward = MethodType(_fused_mlp, mlp)


def _fused_sum(x: Tensor, bias: Tensor | None, mask: Tensor | None, residual: Tensor) -> Tensor:
    """Residual sum, not compiled for two operands, which is one pass already."""
    if bias is None and mask is None:
        return residual_sum(x, bias, mask, residual)
    return fused.residual_sum(x, bias, mask, residual)  # type: ignore[no-any-return]


def _fused_mlp(self: Any, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
    """Megatron-core's ``MLP.forward`` for dense models: hidden [s, b, h] -> the branch and fc2's bias."""
    x, bias = self.linear_fc1(hidden)
    return self.linear_fc2(self.fused_activation(x, bias))  # type: ignore[no-any-return]


@dataclass
class LayerContext:
    """State shared by all layers of a stage; ``config`` is Megatron-core's TransformerConfig.

    ``vocab_size`` is padded; ``learned_positions``: whether there is a table of ``max_positions`` rows, else rotary
    embeddings; ``fuse``: whether the modules of backend ``torch`` compute with compiled functions.
    """

    config: Any
    dims: ParallelDims
    streams: DropoutStreams
    seed: int
    vocab_size: int
    max_positions: int
    learned_positions: bool
    rotary_base: int
    backend: str = "torch"
    fuse: bool = False
    _rotary: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def sequence_shard(self) -> tuple[int, int]:
        """(part, number of parts) of the sequence in this rank's hidden states."""
        return (self.dims.tp_rank, self.dims.tensor) if self.config.sequence_parallel else (0, 1)

    def rotary_angles(self, length: int, device: torch.device) -> Tensor:
        """Angles of the rotary embedding, [s, 1, 1, d] in fp32; computed once per length and device.

        Source: Su et al. 2021, RoFormer (arXiv 2104.09864), halves not interleaved.
        """
        if (length, device) not in self._rotary:
            dim = self.config.kv_channels
            exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
            angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), self.rotary_base**-exponent)
            self._rotary[length, device] = torch.cat((angles, angles), dim=-1)[:, None, None, :]
        return self._rotary[length, device]

    def rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [s, 1, 1, d] in the type of x [s, b, n, d]; the sine's first half is negated.

        Computed once per length, device and type.
        """
        key = (x.shape[0], x.device, x.dtype)
        if key not in self._rotary:
            angles = self.rotary_angles(*key[:2])
            sine = angles.sin()
            sine[..., : sine.shape[-1] // 2].neg_()
            self._rotary[key] = (angles.cos().to(x.dtype), sine.to(x.dtype))
        return self._rotary[key]


@functools.cache
def _local_embedding() -> type:
    """Megatron-core's word embedding, returning only the contribution of this tensor rank's vocabulary entries.

    The caller sums over tensor ranks, so that a rank's own result can be observed before. Defined in a function,
    because Megatron-core is imported late.
    """
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    class LocalEmbedding(VocabParallelEmbedding):
        def forward(self, tokens: Tensor) -> Tensor:
            """Look up [b, s] -> [b, s, h]; zero if the entry belongs to another rank."""
            if self.num_embeddings_per_partition == self.num_embeddings:
                if self.deterministic_mode:
                    return self.weight[tokens]
                # The backward of indexing adds in the order of the gradient's memory, here [s, b], that of F.embedding
                # in the order of the tokens. In the same order both have the same bits on a CPU.
                return F.embedding(tokens.t(), self.weight).transpose(0, 1).contiguous()
            elsewhere = (tokens < self.vocab_start_index) | (tokens >= self.vocab_end_index)
            local = (tokens - self.vocab_start_index).masked_fill(elsewhere, 0)
            # On CUDA the backward of indexing is deterministic (it sorts); that of F.embedding adds in any order.
            words = self.weight[local] if self.deterministic_mode else F.embedding(local, self.weight)
            return words.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    return LocalEmbedding


class TiedOutput(nn.Module):
    """Output of a model with tied embeddings; has no weights of its own.

    ``tensor_parallel``: there is more than one tensor rank; ``sequence_parallel``: hidden states are split along the
    sequence.
    """

    def __init__(self, tensor_parallel: bool, sequence_parallel: bool) -> None:
        super().__init__()
        self.allreduce_dgrad = tensor_parallel and not sequence_parallel
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Hidden [s, b, h] (or [s/tp, b, h]) and weight [v/tp, h] -> logits [s, b, v/tp]."""
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        return linear_with_grad_accumulation_and_async_allreduce(
            input=hidden,
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=self.allreduce_dgrad,
            sequence_parallel=self.sequence_parallel,
        )


class WordEmbedding(nn.Module):
    """Token ids [b, s] to word vectors [s, b, h]; the vocabulary is split over tensor ranks."""

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        self.tensor_parallel = context.dims.tensor > 1
        with seeded_build(context.seed, index):
            self.word_embeddings = _local_embedding()(
                num_embeddings=context.vocab_size,
                embedding_dim=context.config.hidden_size,
                init_method=context.config.init_method,
                config=context.config,
            )
        self.output = TiedOutput(self.tensor_parallel, context.config.sequence_parallel)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up [b, s] -> [s, b, h]."""
        words = self.word_embeddings(tokens)
        if self.tensor_parallel:
            from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

            words = reduce_from_tensor_model_parallel_region(words)
        return words.transpose(0, 1).contiguous()

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of a model with tied embeddings: hidden [s, b, h] (or [s/tp, b, h]) -> logits [s, b, v/tp]."""
        return self.output(hidden, self.word_embeddings.weight)


def tied_logits(embedding: WordEmbedding, hidden: Tensor) -> Tensor:
    """The last layer of a model with tied embeddings, in the form that DeepSpeed's TiedLayerSpec requires."""
    return embedding.logits(hidden)


class PositionEmbedding(nn.Module):
    """Adds learned positions if the model has them, drops out, and shards the sequence for sequence parallelism."""

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        self.context = context
        self.index = index
        self.positions: nn.Embedding | None = None
        if context.learned_positions:
            with seeded_build(context.seed, index):
                self.positions = nn.Embedding(context.max_positions, context.config.hidden_size)
                context.config.init_method(self.positions.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], or [s/tp, b, h] with sequence parallelism."""
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: hidden.shape[0], None, :]
        mask = self.mask(hidden)
        if mask is not None:
            hidden = hidden * mask
        if self.context.config.sequence_parallel:
            from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

            hidden = scatter_to_sequence_parallel_region(hidden)
        return hidden

    def mask(self, hidden: Tensor) -> Tensor | None:
        """Dropout's mask, scaled, [s, b, h]; None: nothing is dropped."""
        prob = self.context.config.hidden_dropout
        if not self.training or prob <= 0:
            return None
        return hidden_masks(self.context.streams, hidden, prob, self.index, SITE_EMBEDDING, (0, 1))


class TransformerBlock(nn.Module):
    """One transformer layer of Megatron-core."""

    def __init__(self, context: LayerContext, index: int, layer_number: int) -> None:
        from megatron.core.transformer import build_module

        super().__init__()
        self.context = context
        config = context.config
        with seeded_build(context.seed, index):
            self.layer = build_module(layer_spec(context), config=config, layer_number=layer_number)
        rotates = not context.learned_positions and not (config.no_rope_freq and config.no_rope_freq[layer_number - 1])
        for module in self.layer.modules():
            if isinstance(module, TorchAttention):
                module.streams, module.layer_number, module.tp_rank = context.streams, index, context.dims.tp_rank
                module.rotation = context.rotation if rotates else None
        for site, module in (
            (SITE_ATTENTION_RESIDUAL, self.layer.self_attn_bda),
            (SITE_MLP_RESIDUAL, self.layer.mlp_bda),
        ):
            module.streams, module.layer_number, module.site = context.streams, index, site
            module.sequence_shard = context.sequence_shard
        if context.fuse:
            fuse_layer(self.layer)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], or [s/tp, b, h] with sequence parallelism."""
        rotary = None
        if self.context.backend == "transformer_engine" and not self.context.learned_positions:
            length = hidden.shape[0] * self.context.sequence_shard[1]
            rotary = self.context.rotary_angles(length, hidden.device)
        output, _ = self.layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
        return output


class FinalNorm(nn.Module):
    """The norm between the last transformer layer and the output."""

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        config = context.config
        with seeded_build(context.seed, index):
            self.norm = (FusedNorm if context.fuse else Norm)(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], or a shard of it."""
        return self.norm(hidden)


class OutputLayer(nn.Module):
    """Hidden states to logits with its own weights; the vocabulary is split over tensor ranks."""

    def __init__(self, context: LayerContext, index: int) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        super().__init__()
        config = context.config
        with seeded_build(context.seed, index):
            self.output = ColumnParallelLinear(
                config.hidden_size,
                context.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                gather_output=False,
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] (or [s/tp, b, h]) -> logits [s, b, v/tp]."""
        return self.output(hidden)[0]


def layer_spec(context: LayerContext) -> Any:
    """Megatron-core's specification of one transformer layer with megasdc's modules, for either backend."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    config = context.config
    if context.backend == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = FusedNorm if context.fuse else Norm
        attention.core_attention = TorchAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = FusedHeadNorm if context.fuse else HeadNorm
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = ResidualAdd
    return spec


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def build_transformer_config(model: ModelSection, parallel: ParallelSection, dtype: torch.dtype) -> TransformerConfig:
    """Translate the sections into Megatron-core's configuration; ``dtype``: type of the parameters while training.

    Pipeline parallelism is DeepSpeed's, so Megatron-core is configured with one stage. ConfigError if Megatron-core
    refuses the combination; names in ``model.megatron`` were checked on loading.
    """
    from megatron.core.transformer import TransformerConfig

    fused = model.backend == "transformer_engine"
    fields: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups or model.num_attention_heads,
        "kv_channels": model.kv_channels or model.hidden_size // model.num_attention_heads,
        "ffn_hidden_size": ffn_width(model),
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "activation_func": ACTIVATIONS[model.activation],
        "gated_linear_unit": model.gated_mlp,
        "add_bias_linear": model.bias,
        "add_qkv_bias": model.bias or model.qkv_bias,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_std,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": 1,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu_initialization": True,
        "perform_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": fused,
        "persist_layer_norm": False,
        "attention_softmax_in_fp32": True,
    }
    try:
        return TransformerConfig(**{**fields, **large_as_floats(model.megatron)})
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"megasdc.model: Megatron-core refuses these values: {error}") from error
