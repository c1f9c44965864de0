"""Which Hugging Face model is a GPT of ours, tensor by tensor? Names, layouts and configurations, both ways.

Pure functions over whole (unsharded) tensors with the real rows of the vocabulary. Our names are those of
``megasdc.model.sharding``; theirs those of ``GPT2LMHeadModel`` and ``LlamaForCausalLM``. What differs besides names:
GPT-2's linear weights are transposed, ``c_attn`` is [q; k; v] where ours is [q heads of a group, k, v] a group, and
Llama has separate query, key, value, gate and up matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from megasdc.config import ModelSection, ffn_width, head_width, query_groups
from megasdc.errors import ConfigError
from megasdc.model.sharding import LEADING_LAYERS

HfClass = Literal["GPT2LMHeadModel", "LlamaForCausalLM"]
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "relu": "relu"}
"""Names of the ``activation`` field in Hugging Face's configurations."""
_ACTIVATIONS_BACK = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
HARMLESS_MEGATRON_FIELDS = frozenset({"deterministic_mode"})
"""Fields of ``model.megatron`` that change how, not what, a model computes."""
SUPPORTED = (
    "GPT2LMHeadModel (learned positions, LayerNorm, no gate, as many query groups as heads) and "
    "LlamaForCausalLM (rope, RMSNorm, gated MLP)"
)


class Form(Enum):
    """How the tensors of one rule relate."""

    SAME = "one tensor, unchanged"
    TRANSPOSED = "one tensor, dimensions swapped"
    QKV_JOINED = "[q; k; v] in one tensor; its weight is transposed"
    QKV_APART = "three tensors"
    GATE_UP = "gate and up in two tensors"
    ZERO = "theirs alone: a bias that we have not"


@dataclass(frozen=True)
class Rule:
    """One parameter of ours and what it is there.

    Args:
        ours: our name; empty for ``Form.ZERO``.
        theirs: their names, in the order of ``form``.
        form: how they relate.
        width: elements, for ``Form.ZERO`` only.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Form = Form.SAME
    width: int = 0


def hf_class(model: ModelSection) -> HfClass:
    """The Hugging Face class that computes what this model computes.

    Raises:
        ConfigError: there is none; every field in the way is named.
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
    """The content of ``config.json``.

    Args:
        model: the resolved section.
        vocab_size: real entries of the vocabulary.
        end_of_document: its id; null where it is not known.
        dtype: name of the tensors' type, such as ``float32``.

    Raises:
        ConfigError: as ``hf_class``.
    """
    name = hf_class(model)
    common = {
        "architectures": [name],
        "dtype": dtype,
        "torch_dtype": dtype,  # what transformers before 4.56 reads
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
        "rope_theta": float(model.rotary_base),  # what transformers before 5 reads
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model.rotary_base)},
        "attention_bias": model.bias or model.qkv_bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.attention_dropout,
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


def num_pipeline_layers(model: ModelSection) -> int:
    """Pipeline layers that hold parameters of their own: embedding, positions, blocks, norm, and an untied output."""
    return LEADING_LAYERS + model.num_layers + (1 if model.tie_embeddings else 2)


def rules(model: ModelSection, index: int) -> list[Rule]:
    """What a pipeline layer's parameters are there; our names are without the layer's number.

    Args:
        model: the resolved section.
        index: place of the layer in the pipeline.

    Raises:
        ConfigError: as ``hf_class``.
    """
    gpt2 = hf_class(model) == "GPT2LMHeadModel"
    last = LEADING_LAYERS + model.num_layers
    if index == 0:
        return [Rule("word_embeddings.weight", ("transformer.wte.weight" if gpt2 else "model.embed_tokens.weight",))]
    if index == 1:
        return [Rule("positions.weight", ("transformer.wpe.weight",))] if gpt2 else []
    if index == last:
        kinds = ("weight", "bias") if gpt2 else ("weight",)
        return [Rule(f"norm.{kind}", (f"{'transformer.ln_f' if gpt2 else 'model.norm'}.{kind}",)) for kind in kinds]
    if index == last + 1:
        return [] if model.tie_embeddings else [Rule("output.weight", ("lm_head.weight",))]
    return (_gpt2_rules if gpt2 else _llama_rules)(model, index - LEADING_LAYERS)


def _gpt2_rules(model: ModelSection, layer: int) -> list[Rule]:
    there, h = f"transformer.h.{layer}", model.hidden_size
    found = []
    for ours, theirs, form, width, biased in (
        ("self_attention.linear_qkv", "attn.c_attn", Form.QKV_JOINED, 3 * h, model.bias or model.qkv_bias),
        ("self_attention.linear_proj", "attn.c_proj", Form.TRANSPOSED, h, model.bias),
        ("mlp.linear_fc1", "mlp.c_fc", Form.TRANSPOSED, ffn_width(model), model.bias),
        ("mlp.linear_fc2", "mlp.c_proj", Form.TRANSPOSED, h, model.bias),
    ):
        found.append(Rule(f"layer.{ours}.weight", (f"{there}.{theirs}.weight",), form))
        name = (f"{there}.{theirs}.bias",)
        bias_form = Form.QKV_JOINED if form is Form.QKV_JOINED else Form.SAME
        found.append(Rule(f"layer.{ours}.bias", name, bias_form) if biased else Rule("", name, Form.ZERO, width))
    for ours, theirs in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
        found += [Rule(f"layer.{ours}.{kind}", (f"{there}.{theirs}.{kind}",)) for kind in ("weight", "bias")]
    return found


def _llama_rules(model: ModelSection, layer: int) -> list[Rule]:
    there = f"model.layers.{layer}"
    found = [
        Rule("layer.input_layernorm.weight", (f"{there}.input_layernorm.weight",)),
        Rule("layer.pre_mlp_layernorm.weight", (f"{there}.post_attention_layernorm.weight",)),
    ]
    for kind in ("weight", "bias"):
        if kind == "weight" or model.bias or model.qkv_bias:
            qkv = tuple(f"{there}.self_attn.{which}_proj.{kind}" for which in "qkv")
            found.append(Rule(f"layer.self_attention.linear_qkv.{kind}", qkv, Form.QKV_APART))
        if kind == "weight" or model.bias:
            gate_up = (f"{there}.mlp.gate_proj.{kind}", f"{there}.mlp.up_proj.{kind}")
            found.append(Rule(f"layer.self_attention.linear_proj.{kind}", (f"{there}.self_attn.o_proj.{kind}",)))
            found.append(Rule(f"layer.mlp.linear_fc1.{kind}", gate_up, Form.GATE_UP))
            found.append(Rule(f"layer.mlp.linear_fc2.{kind}", (f"{there}.mlp.down_proj.{kind}",)))
    if model.qkv_bias and not model.bias:  # attention_bias there means the output projection too
        found.append(Rule("", (f"{there}.self_attn.o_proj.bias",), Form.ZERO, model.hidden_size))
    return found


def to_hf(model: ModelSection, index: int, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one pipeline layer, as Hugging Face has them.

    Args:
        model: the resolved section.
        index: place of the layer in the pipeline.
        ours: whole parameters by name, without the layer's number; the vocabulary without its padding.

    Returns:
        By their names; views where nothing is moved.

    Raises:
        ConfigError: as ``hf_class``.
    """
    found: dict[str, Tensor] = {}
    for rule in rules(model, index):
        if rule.form is Form.ZERO:
            like = next(iter(ours.values()))
            found[rule.theirs[0]] = torch.zeros(rule.width, dtype=like.dtype, device=like.device)
            continue
        whole = ours[rule.ours]
        if rule.form is Form.QKV_JOINED:
            parts: tuple[Tensor, ...] = (_turned(torch.cat(split_qkv(model, whole))),)
        elif rule.form is Form.QKV_APART:
            parts = split_qkv(model, whole)
        elif rule.form is Form.GATE_UP:
            parts = whole.chunk(2)
        else:
            parts = (whole.T if rule.form is Form.TRANSPOSED else whole,)
        found.update(zip(rule.theirs, parts, strict=True))
    return found


def from_hf(model: ModelSection, index: int, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of one pipeline layer from Hugging Face's tensors; the reverse of ``to_hf``.

    Args:
        model: the resolved section.
        index: place of the layer in the pipeline.
        theirs: at least the tensors that ``rules`` names.

    Raises:
        ConfigError: as ``hf_class``; or a bias that we have not is not zero.
    """
    found: dict[str, Tensor] = {}
    for rule in rules(model, index):
        parts = [theirs[name] for name in rule.theirs]
        if rule.form is Form.ZERO:
            if parts[0].any():
                raise ConfigError(f"{rule.theirs[0]}: is not zero; supported are biases everywhere or on q, k, v alone")
        elif rule.form is Form.QKV_JOINED:
            found[rule.ours] = join_qkv(model, *_turned(parts[0]).chunk(3))
        elif rule.form is Form.QKV_APART:
            found[rule.ours] = join_qkv(model, *parts)
        elif rule.form is Form.GATE_UP:
            found[rule.ours] = torch.cat(parts)
        else:
            found[rule.ours] = parts[0].T if rule.form is Form.TRANSPOSED else parts[0]
    return found


def split_qkv(model: ModelSection, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, [n d, ...] and twice [g d, ...], of Megatron-core's interleaved tensor [(n + 2 g) d, ...].

    Args:
        model: gives query heads n, groups g and the width d of a head.
        whole: for each group its query heads, its key head, its value head.
    """
    groups, head = query_groups(model), head_width(model)
    queries = model.num_attention_heads // groups
    grouped = whole.view(groups, queries + 2, head, *whole.shape[1:])
    parts = (grouped[:, :queries], grouped[:, queries], grouped[:, queries + 1])
    query, key, value = (part.reshape(-1, *whole.shape[1:]) for part in parts)
    return query, key, value


def join_qkv(model: ModelSection, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Megatron-core's interleaved tensor [(n + 2 g) d, ...]; the reverse of ``split_qkv``."""
    groups, head = query_groups(model), head_width(model)
    grouped = [part.reshape(groups, -1, head, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(grouped, 1).reshape(-1, *query.shape[1:])


def _turned(tensor: Tensor) -> Tensor:
    """A transposed matrix, or a vector as it is."""
    return tensor.T if tensor.dim() == 2 else tensor
