"""Which ``model`` section does a ``config.json`` of Hugging Face mean? Every value in it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasdc.errors import ConfigError
from megasdc.model.hf.classes import SUPPORTED

_ACTIVATIONS_BACK = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


def model_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the ``model`` section that a ``config.json`` means.

    Args:
        config: its content; keys left out have the defaults of ``transformers``.

    Raises:
        ConfigError: the architecture or one of its settings is not supported; each is named.
    """
    kind = config.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"model_type: got {kind!r} ({', '.join(config.get('architectures') or ['no architecture'])}); "
            f"supported are {SUPPORTED}."
        )
    problems: list[str] = []
    if config.get("quantization_config"):
        problems.append("quantization_config: quantized weights are not supported; dequantize the model first.")
    fields = _gpt2_fields(config, problems) if kind == "gpt2" else _llama_fields(config, problems)
    if problems:
        raise ConfigError([*problems, f"Supported are {SUPPORTED}."], "config.json of the model")
    return fields


def _gpt2_fields(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    _refuse(config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}, problems)
    _refuse(config, {"add_cross_attention": False}, problems)
    hidden, dropout = config.get("n_embd", 768), config.get("resid_pdrop", 0.1)
    return {
        "num_layers": config.get("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": config.get("n_head", 12),
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "max_positions": config.get("n_positions", 1024),
        "position_embedding": "learned",
        "normalization": "LayerNorm",
        "norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5)),
        "activation": _activation(config, "activation_function", "gelu_new", problems),
        "gated_mlp": False,
        "bias": True,
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "hidden_dropout": float(dropout),
        "attention_dropout": float(config.get("attn_pdrop", 0.1)),
        "init_std": float(config.get("initializer_range", 0.02)),
    }


def _llama_fields(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    if rope_kind != "default":
        problems.append(f"rope_parameters.rope_type: got {rope_kind!r}; supported is 'default'.")
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if base != int(base):
        problems.append(f"rope_theta: got {base}; supported are whole numbers.")
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    if mlp_bias and not attention_bias:
        problems.append("mlp_bias: got true without attention_bias; supported are both, or attention_bias alone.")
    hidden, heads = config.get("hidden_size", 4096), config.get("num_attention_heads", 32)
    return {
        "num_layers": config.get("num_hidden_layers", 32),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or hidden // heads,
        "ffn_hidden_size": config.get("intermediate_size", 11008),
        "max_positions": config.get("max_position_embeddings", 2048),
        "position_embedding": "rope",
        "rotary_base": int(base),
        "normalization": "RMSNorm",
        "norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "activation": _activation(config, "hidden_act", "silu", problems),
        "gated_mlp": True,
        "bias": bool(attention_bias and mlp_bias),
        "qkv_bias": bool(attention_bias and not mlp_bias),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        "attention_dropout": float(config.get("attention_dropout", 0.0)),
        "init_std": float(config.get("initializer_range", 0.02)),
    }


def _refuse(config: Mapping[str, Any], wanted: Mapping[str, Any], problems: list[str]) -> None:
    for key, value in wanted.items():
        if config.get(key, value) != value:
            problems.append(f"{key}: got {config[key]!r}; supported is {value!r}.")


def _activation(config: Mapping[str, Any], key: str, default: str, problems: list[str]) -> str:
    name = config.get(key, default)
    if name not in _ACTIVATIONS_BACK:
        problems.append(f"{key}: got {name!r}; supported are {', '.join(_ACTIVATIONS_BACK)}.")
    return _ACTIVATIONS_BACK.get(name, "gelu")
