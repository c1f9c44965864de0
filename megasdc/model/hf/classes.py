"""The class of ``transformers`` that computes the same as a model of megasdc, and its ``config.json``."""

from __future__ import annotations

from typing import Any, Literal

from megasdc.common.errors import ConfigError
from megasdc.config.model import ModelSection, ffn_width, head_width, query_groups

HfClass = Literal["GPT2LMHeadModel", "LlamaForCausalLM"]
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "relu": "relu"}
"""Names of the ``activation`` field in Hugging Face's configurations."""
HARMLESS_MEGATRON_FIELDS = frozenset({"deterministic_mode"})
"""Fields of ``model.megatron`` that change how, not what, a model computes."""
SUPPORTED = (
    "GPT2LMHeadModel (learned positions, LayerNorm, no gate, as many query groups as heads) and "
    "LlamaForCausalLM (rope, RMSNorm, gated MLP)"
)


def hf_class(model: ModelSection) -> HfClass:
    """The Hugging Face class that computes what this model computes.

    Raises:
        ConfigError: there is none; lists every field that prevents it.
    """
    learned = model.position_embedding == "learned"
    problems: list[str] = []

    def need(field: str, value: Any, wanted: Any, why: str) -> None:
        if value != wanted:
            problems.append(f"megasdc.model.{field}: got {value!r}; {why} needs {wanted!r}.")

    name: HfClass = "GPT2LMHeadModel" if learned else "LlamaForCausalLM"
    why = f'with position_embedding "{model.position_embedding}", {name}'
    need("normalization", model.normalization, "LayerNorm" if learned else "RMSNorm", why)
    need("gated_mlp", model.gated_mlp, not learned, why)
    if learned:
        need("num_query_groups", query_groups(model), model.num_attention_heads, why)
        need("kv_channels", head_width(model) * model.num_attention_heads, model.hidden_size, f"{why} (times heads)")
    elif model.hidden_size % model.num_attention_heads:
        problems.append(
            f"megasdc.model.num_attention_heads: got {model.num_attention_heads}; {why} needs a divisor of "
            f"hidden_size {model.hidden_size}, also where kv_channels is given."
        )
    problems += [
        f"megasdc.model.megatron.{field}: got {value!r}; no Hugging Face class knows it."
        for field, value in model.megatron.items()
        if field not in HARMLESS_MEGATRON_FIELDS and value not in (None, False)
    ]
    if problems:
        raise ConfigError([*problems, f"Supported are {SUPPORTED}."], "the model, which Hugging Face cannot express")
    return name


def hf_config(model: ModelSection, vocab_size: int, end_of_document: int | None, dtype: str) -> dict[str, Any]:
    """Content of ``config.json``.

    Args:
        vocab_size: real entries of the vocabulary.
        end_of_document: id of the end-of-document token; None if not known.
        dtype: name of the tensors' type, such as ``float32``.

    Raises:
        ConfigError: as ``hf_class``.
    """
    name = hf_class(model)
    common = {
        "architectures": [name],
        "dtype": dtype,
        "torch_dtype": dtype,  # read by transformers before 4.56
        "vocab_size": vocab_size,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "use_cache": True,
    }
    if name == "GPT2LMHeadModel":
        return {
            **common,
            "model_type": "gpt2",
            "n_positions": model.max_positions,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": ffn_width(model),
            "activation_function": ACTIVATIONS[model.activation],
            "layer_norm_epsilon": model.norm_epsilon,
            "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
        }
    return {
        **common,
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": ffn_width(model),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": query_groups(model),
        "head_dim": head_width(model),
        "hidden_act": ACTIVATIONS[model.activation],
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": float(model.rotary_base),  # read by transformers before 5
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model.rotary_base)},
        "attention_bias": model.bias or model.qkv_bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.attention_dropout,
    }
