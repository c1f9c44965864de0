"""Which Megatron-core configuration does the ``model`` section mean?"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megasdc.config.sections import ModelSection, ParallelSection
from megasdc.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}

OWN_FIELDS = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "ffn_hidden_size",
        "normalization",
        "layernorm_epsilon",
        "activation_func",
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "params_dtype",
        "pipeline_dtype",
        "bf16",
        "fp16",
        "use_cpu_initialization",
        "perform_initialization",
    }
)
"""Fields that have a name of their own in the configuration; ``model.megatron`` must not set them a second time."""

UNSUPPORTED_FIELDS: dict[str, str] = {
    "num_moe_experts": "megasdc trains dense models",
    "context_parallel_size": "sequences are split over tensor ranks only (parallel.sequence_parallel)",
    "virtual_pipeline_model_parallel_size": "each stage holds one run of layers",
    "recompute_granularity": "set DeepSpeed's pipeline.activation_checkpoint_interval",
    "recompute_method": "set DeepSpeed's pipeline.activation_checkpoint_interval",
    "recompute_num_layers": "set DeepSpeed's pipeline.activation_checkpoint_interval",
    "gradient_accumulation_fusion": "DeepSpeed accumulates gradients",
    "fp8": "not built",
    "multi_latent_attention": "not built",
}


def ffn_width(section: ModelSection) -> int:
    """Width of the MLP: as given, else 4 h, or 8/3 h rounded up to a multiple of 64 where the MLP is gated."""
    if section.ffn_hidden_size is not None:
        return section.ffn_hidden_size
    if section.gated_mlp:
        return -(-8 * section.hidden_size // (3 * 64)) * 64
    return 4 * section.hidden_size


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The vocabulary padded to a multiple; does not depend on the layout."""
    return -(-vocab_size // multiple) * multiple


def build_transformer_config(model: ModelSection, parallel: ParallelSection, dtype: torch.dtype) -> TransformerConfig:
    """Translate the sections into Megatron-core's configuration.

    Pipeline parallelism is DeepSpeed's, so Megatron-core is told that there is one stage.

    Args:
        model: sizes and kinds.
        parallel: the layout.
        dtype: type of the parameters while training.

    Raises:
        ConfigError: ``model.megatron`` names a field that does not exist, that the section sets itself, or that the
            pipeline cannot honour; or Megatron-core refuses the combination.
    """
    from megatron.core.transformer import TransformerConfig

    problems = check_megatron_fields(model.megatron)
    if problems:
        raise ConfigError(problems)
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
        return TransformerConfig(**{**fields, **model.megatron})
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"megasdc.model: Megatron-core refuses these values: {error}") from error


def check_megatron_fields(fields: dict[str, Any]) -> list[str]:
    """Problems of ``model.megatron``, one sentence each; empty when there are none."""
    from megatron.core.transformer import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    problems = []
    for name in fields:
        place = f"megasdc.model.megatron.{name}"
        if name in OWN_FIELDS:
            problems.append(
                f"{place}: set by a field of its own in megasdc.model, megasdc.parallel or DeepSpeed's part"
            )
        elif name in UNSUPPORTED_FIELDS:
            problems.append(f"{place}: {UNSUPPORTED_FIELDS[name]}")
        elif name not in known:
            near = difflib.get_close_matches(name, sorted(known), 3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            problems.append(f"{place}: Megatron-core's TransformerConfig has no such field{hint}")
    return problems
