"""Layers of the pipeline: embedding, positions, transformer layers, final norm, output.

Each class is one entry of the pipeline: one tensor in, one tensor out. Hidden states are [s, b, h], or [s/tp, b, h]
with sequence parallelism. Every layer is built under a seed of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasdc.model.fused import FusedHeadNorm, FusedNorm, fuse_layer
from megasdc.model.modules import (
    SITE_ATTENTION_RESIDUAL,
    SITE_EMBEDDING,
    SITE_MLP_RESIDUAL,
    HeadNorm,
    Norm,
    ResidualAdd,
    TorchAttention,
    hidden_masks,
)
from megasdc.model.randomness import DropoutStreams, seeded_build
from megasdc.parallel.dims import ParallelDims


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
                return self._look_up(tokens)
            elsewhere = (tokens < self.vocab_start_index) | (tokens >= self.vocab_end_index)
            local = self._look_up((tokens - self.vocab_start_index).masked_fill(elsewhere, 0))
            return local.masked_fill(elsewhere.unsqueeze(-1), 0.0)

        def _look_up(self, tokens: Tensor) -> Tensor:
            # On CUDA the backward of indexing is deterministic (it sorts); that of F.embedding adds in any order.
            return self.weight[tokens] if self.deterministic_mode else F.embedding(tokens, self.weight)

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
        """Dropout's, scaled, [s, b, h]; None: nothing is dropped."""
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
