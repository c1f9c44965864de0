"""Section of the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megasdc.config.fields import FLAG, NO_MATTER, REFUSED, PositiveFloat, PositiveInt, Probability, Section, setting


class ModelSection(Section):
    """The GPT to train: a preset, single sizes, or a preset with some sizes changed."""

    preset: str | None = setting(None, "Name of a preset size; null: sizes are given field by field.", NO_MATTER)
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = setting(2, "Number of transformer layers.", REFUSED)
    hidden_size: PositiveInt = setting(128, "Width h of the residual stream.", REFUSED)
    num_attention_heads: PositiveInt = setting(4, "Number of query heads.", REFUSED)
    num_query_groups: PositiveInt | None = setting(
        None, "Number of key/value heads (grouped-query attention); null: as many as query heads.", REFUSED
    )
    kv_channels: PositiveInt | None = setting(
        None, "Width of one head; null: hidden_size / num_attention_heads.", REFUSED
    )
    ffn_hidden_size: PositiveInt | None = setting(
        None, "Width of the MLP; null: 4 h, or with a gated MLP 8/3 h rounded up to a multiple of 64.", REFUSED
    )
    max_positions: PositiveInt = setting(
        2048, "Longest sequence the model can see, in tokens; size of the learned position table.", FLAG
    )
    position_embedding: Literal["learned", "rope"] = setting("learned", "Kind of position information.", REFUSED)
    rotary_base: PositiveInt = setting(10000, "Base of the rotary frequencies; read with rope only.", FLAG)
    normalization: Literal["LayerNorm", "RMSNorm"] = setting("LayerNorm", "Kind of normalisation.", REFUSED)
    norm_epsilon: PositiveFloat = setting(1e-5, "Added to the variance in every normalisation.", FLAG)
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = setting(
        "gelu_tanh", "MLP activation; gelu_tanh is GPT-2's tanh approximation of GELU.", FLAG
    )
    gated_mlp: bool = setting(False, "Gate the MLP; silu with a gate is SwiGLU.", REFUSED)
    bias: bool = setting(True, "Biases in the linear layers of attention and MLP.", REFUSED)
    qkv_bias: bool = setting(False, "A bias on query, key and value also where `bias` is false.", REFUSED)
    tie_embeddings: bool = setting(True, "Output weights are the word embedding.", REFUSED)
    hidden_dropout: Probability = setting(0.0, "Dropout on embeddings and residual branches, in [0, 1).", FLAG)
    attention_dropout: Probability = setting(
        0.0, "Dropout on attention probabilities, in [0, 1); above 0 attention is computed unfused.", FLAG
    )
    init_std: PositiveFloat = setting(0.02, "Standard deviation of initial weights.", FLAG)
    vocab_multiple: PositiveInt = setting(
        128, "The vocabulary is padded to a multiple of this; must be divisible by every tensor size used.", FLAG
    )
    backend: Literal["torch", "transformer_engine"] = setting(
        "torch", "Submodules from plain PyTorch (CPU and GPU) or from Transformer Engine (GPU, installed apart).", FLAG
    )
    fuse: bool = setting(
        False,
        "Norms, rotary embedding, activation, residual sums and cross-entropy compiled, each alone; needs backend "
        "torch and a C++ compiler (on a GPU Triton and a C compiler).",
        FLAG,
    )
    initial_weights: str | None = setting(
        None,
        "Folder made by `megasdc import-hf`, a checkpoint of any layout, or a folder of checkpoints (the newest whole "
        "one is taken); its weights alone are used, at step 0 only; null: random weights.",
        NO_MATTER,
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
