"""Translation of the ``model`` section to Megatron-core's TransformerConfig."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megasdc.common.errors import ConfigError
from megasdc.config.deepspeed_part import large_as_floats
from megasdc.config.sections.megasdc import ParallelSection
from megasdc.config.sections.model import ModelSection, ffn_width

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The vocabulary padded to a multiple; does not depend on the layout."""
    return -(-vocab_size // multiple) * multiple


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
