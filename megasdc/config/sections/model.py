"""Section of the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megasdc.config.fields import (
    FLAG,
    NO_MATTER,
    REFUSED,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)


class ModelSection(Section):
    """The GPT to train: a preset, single sizes, or a preset with some sizes changed."""

    preset: str | None = Field(
        None, description="Name of a preset size; null: sizes are given field by field.", json_schema_extra=NO_MATTER
    )
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = Field(
        2, description="Number of transformer layers.", json_schema_extra=REFUSED
    )
    hidden_size: PositiveInt = Field(128, description="Width h of the residual stream.", json_schema_extra=REFUSED)
    num_attention_heads: PositiveInt = Field(4, description="Number of query heads.", json_schema_extra=REFUSED)
    num_query_groups: PositiveInt | None = Field(
        None,
        description="Number of key/value heads (grouped-query attention); null: as many as query heads.",
        json_schema_extra=REFUSED,
    )
    kv_channels: PositiveInt | None = Field(
        None, description="Width of one head; null: hidden_size / num_attention_heads.", json_schema_extra=REFUSED
    )
    ffn_hidden_size: PositiveInt | None = Field(
        None,
        description="Width of the MLP; null: 4 h, or with a gated MLP 8/3 h rounded up to a multiple of 64.",
        json_schema_extra=REFUSED,
    )
    max_positions: PositiveInt = Field(
        2048,
        description="Longest sequence the model can see, in tokens; size of the learned position table.",
        json_schema_extra=FLAG,
    )
    position_embedding: Literal["learned", "rope"] = Field(
        "learned", description="Kind of position information.", json_schema_extra=REFUSED
    )
    rotary_base: PositiveInt = Field(
        10000, description="Base of the rotary frequencies; read with rope only.", json_schema_extra=FLAG
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = Field(
        "LayerNorm", description="Kind of normalisation.", json_schema_extra=REFUSED
    )
    norm_epsilon: PositiveFloat = Field(
        1e-5, description="Added to the variance in every normalisation.", json_schema_extra=FLAG
    )
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = Field(
        "gelu_tanh",
        description="MLP activation; gelu_tanh is GPT-2's tanh approximation of GELU.",
        json_schema_extra=FLAG,
    )
    gated_mlp: bool = Field(False, description="Gate the MLP; silu with a gate is SwiGLU.", json_schema_extra=REFUSED)
    bias: bool = Field(True, description="Biases in the linear layers of attention and MLP.", json_schema_extra=REFUSED)
    qkv_bias: bool = Field(
        False, description="A bias on query, key and value also where `bias` is false.", json_schema_extra=REFUSED
    )
    tie_embeddings: bool = Field(True, description="Output weights are the word embedding.", json_schema_extra=REFUSED)
    hidden_dropout: Probability = Field(
        0.0, description="Dropout on embeddings and residual branches, in [0, 1).", json_schema_extra=FLAG
    )
    attention_dropout: Probability = Field(
        0.0,
        description="Dropout on attention probabilities, in [0, 1); above 0 attention is computed unfused.",
        json_schema_extra=FLAG,
    )
    init_std: PositiveFloat = Field(0.02, description="Standard deviation of initial weights.", json_schema_extra=FLAG)
    vocab_multiple: PositiveInt = Field(
        128,
        description="The vocabulary is padded to a multiple of this; must be divisible by every tensor size used.",
        json_schema_extra=FLAG,
    )
    backend: Literal["torch", "transformer_engine"] = Field(
        "torch",
        description="Submodules from plain PyTorch (CPU and GPU) or from Transformer Engine (GPU, installed apart).",
        json_schema_extra=FLAG,
    )
    fuse: bool = Field(
        False,
        description="Norms, rotary embedding, activation, residual sums and cross-entropy compiled, each alone; "
        "needs backend torch and a C++ compiler (on a GPU Triton and a C compiler).",
        json_schema_extra=FLAG,
    )
    initial_weights: str | None = Field(
        None,
        description="Folder made by `megasdc import-hf`; its weights are used at step 0 only; null: random weights.",
        json_schema_extra=NO_MATTER,
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of Megatron-core's TransformerConfig that have effect, by name; applied last.",
        json_schema_extra=FLAG,
    )


def head_width(model: ModelSection) -> int:
    """Width of one attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def query_groups(model: ModelSection) -> int:
    """Number of key/value heads."""
    return model.num_query_groups or model.num_attention_heads


def ffn_width(model: ModelSection) -> int:
    """Width of the MLP: as given, else 4 h, or with a gate 8/3 h rounded up to a multiple of 64."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    return -(-8 * model.hidden_size // (3 * 64)) * 64 if model.gated_mlp else 4 * model.hidden_size
