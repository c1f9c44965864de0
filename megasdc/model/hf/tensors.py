"""Mapping of tensors between Hugging Face and megasdc: names and layouts, both ways.

Differences besides names: GPT-2's linear weights are transposed; ``c_attn`` is [q; k; v], ours is [q heads of the
group, k, v] per group; and Llama has separate query, key, value, gate and up matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megasdc.common.errors import ConfigError
from megasdc.config.model import ModelSection, ffn_width, head_width, query_groups
from megasdc.model.hf.classes import hf_class
from megasdc.model.sharding import LEADING_LAYERS


class Form(Enum):
    """Kinds of relation between the tensors of one rule."""

    SAME = "one tensor, unchanged"
    TRANSPOSED = "one tensor, dimensions swapped"
    QKV_JOINED = "[q; k; v] in one tensor; its weight is transposed"
    QKV_APART = "three tensors"
    GATE_UP = "gate and up in two tensors"
    ZERO = "theirs alone: a bias that we have not"


@dataclass(frozen=True)
class TensorMapping:
    """One parameter of megasdc and the tensors of Hugging Face that hold it.

    Args:
        ours: our name; empty for ``Form.ZERO``.
        theirs: their names, in the order of ``form``.
        form: relation of our tensor to theirs.
        width: number of elements, for ``Form.ZERO`` only.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Form = Form.SAME
    width: int = 0


def num_pipeline_layers(model: ModelSection) -> int:
    """Number of pipeline layers that can hold their own parameters: all, without a tied output."""
    return LEADING_LAYERS + model.num_layers + (1 if model.tie_embeddings else 2)


def rules(model: ModelSection, index: int) -> list[TensorMapping]:
    """Rules for the parameters of a pipeline layer; our names are without the layer's number.

    Args:
        index: place of the layer in the pipeline.

    Raises:
        ConfigError: as ``hf_class``.
    """
    gpt2 = hf_class(model) == "GPT2LMHeadModel"
    last = LEADING_LAYERS + model.num_layers
    if index == 0:
        return [
            TensorMapping(
                "word_embeddings.weight", ("transformer.wte.weight" if gpt2 else "model.embed_tokens.weight",)
            )
        ]
    if index == 1:
        return [TensorMapping("positions.weight", ("transformer.wpe.weight",))] if gpt2 else []
    if index == last:
        kinds = ("weight", "bias") if gpt2 else ("weight",)
        return [
            TensorMapping(f"norm.{kind}", (f"{'transformer.ln_f' if gpt2 else 'model.norm'}.{kind}",)) for kind in kinds
        ]
    if index == last + 1:
        return [] if model.tie_embeddings else [TensorMapping("output.weight", ("lm_head.weight",))]
    return (_gpt2_rules if gpt2 else _llama_rules)(model, index - LEADING_LAYERS)


def _gpt2_rules(model: ModelSection, layer: int) -> list[TensorMapping]:
    there, h = f"transformer.h.{layer}", model.hidden_size
    found = []
    for ours, theirs, form, width, biased in (
        ("self_attention.linear_qkv", "attn.c_attn", Form.QKV_JOINED, 3 * h, model.bias or model.qkv_bias),
        ("self_attention.linear_proj", "attn.c_proj", Form.TRANSPOSED, h, model.bias),
        ("mlp.linear_fc1", "mlp.c_fc", Form.TRANSPOSED, ffn_width(model), model.bias),
        ("mlp.linear_fc2", "mlp.c_proj", Form.TRANSPOSED, h, model.bias),
    ):
        found.append(TensorMapping(f"layer.{ours}.weight", (f"{there}.{theirs}.weight",), form))
        name = (f"{there}.{theirs}.bias",)
        bias_form = Form.QKV_JOINED if form is Form.QKV_JOINED else Form.SAME
        found.append(
            TensorMapping(f"layer.{ours}.bias", name, bias_form)
            if biased
            else TensorMapping("", name, Form.ZERO, width)
        )
    for ours, theirs in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
        found += [TensorMapping(f"layer.{ours}.{kind}", (f"{there}.{theirs}.{kind}",)) for kind in ("weight", "bias")]
    return found


def _llama_rules(model: ModelSection, layer: int) -> list[TensorMapping]:
    there = f"model.layers.{layer}"
    found = [
        TensorMapping("layer.input_layernorm.weight", (f"{there}.input_layernorm.weight",)),
        TensorMapping("layer.pre_mlp_layernorm.weight", (f"{there}.post_attention_layernorm.weight",)),
    ]
    for kind in ("weight", "bias"):
        if kind == "weight" or model.bias or model.qkv_bias:
            qkv = tuple(f"{there}.self_attn.{which}_proj.{kind}" for which in "qkv")
            found.append(TensorMapping(f"layer.self_attention.linear_qkv.{kind}", qkv, Form.QKV_APART))
        if kind == "weight" or model.bias:
            gate_up = (f"{there}.mlp.gate_proj.{kind}", f"{there}.mlp.up_proj.{kind}")
            found.append(
                TensorMapping(f"layer.self_attention.linear_proj.{kind}", (f"{there}.self_attn.o_proj.{kind}",))
            )
            found.append(TensorMapping(f"layer.mlp.linear_fc1.{kind}", gate_up, Form.GATE_UP))
            found.append(TensorMapping(f"layer.mlp.linear_fc2.{kind}", (f"{there}.mlp.down_proj.{kind}",)))
    if model.qkv_bias and not model.bias:  # their attention_bias includes the output projection
        found.append(TensorMapping("", (f"{there}.self_attn.o_proj.bias",), Form.ZERO, model.hidden_size))
    return found


def hf_shapes(model: ModelSection, vocab_size: int) -> dict[str, list[int]]:
    """The shape that every tensor of a Hugging Face model must have, by its full name.

    Args:
        vocab_size: rows of the word embedding.

    Raises:
        ConfigError: as ``hf_class``.
    """
    h, f, d = model.hidden_size, ffn_width(model), head_width(model)
    heads, groups = model.num_attention_heads * d, query_groups(model) * d
    of_weights = {
        "wte": [vocab_size, h],
        "wpe": [model.max_positions, h],
        "c_attn": [h, 3 * h],
        "attn.c_proj": [h, h],
        "c_fc": [h, f],
        "mlp.c_proj": [f, h],
        "embed_tokens": [vocab_size, h],
        "lm_head": [vocab_size, h],
        "q_proj": [heads, h],
        "k_proj": [groups, h],
        "v_proj": [groups, h],
        "o_proj": [h, heads],
        "gate_proj": [f, h],
        "up_proj": [f, h],
        "down_proj": [h, f],
    }
    gpt2 = hf_class(model) == "GPT2LMHeadModel"
    found = {}
    for index in range(num_pipeline_layers(model)):
        for name in (name for rule in rules(model, index) for name in rule.theirs):
            owner, _, kind = name.rpartition(".")
            weight = next((shape for end, shape in of_weights.items() if owner.endswith(end)), [h])  # norms are vectors
            outputs = weight[-1:] if gpt2 else weight[:1]
            found[name] = weight if kind == "weight" else outputs
    return found


def to_hf(model: ModelSection, index: int, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert one pipeline layer to Hugging Face's tensors.

    Args:
        index: place of the layer in the pipeline.
        ours: unsharded parameters by name, without the layer's number; the vocabulary without its padding.

    Returns:
        The tensors by Hugging Face's names; views where possible.

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
    """Convert Hugging Face's tensors to one pipeline layer; the reverse of ``to_hf``.

    Args:
        index: place of the layer in the pipeline.
        theirs: at least the tensors in ``rules``.

    Raises:
        ConfigError: as ``hf_class``; or a bias that megasdc's model does not have is not zero.
    """
    found: dict[str, Tensor] = {}
    for rule in rules(model, index):
        parts = [theirs[name] for name in rule.theirs]
        if rule.form is not Form.ZERO:
            found[rule.ours] = to_ours(model, rule, parts)
        elif parts[0].any():
            raise ConfigError(f"{rule.theirs[0]}: is not zero; supported are biases everywhere or on q, k, v alone")
    return found


def to_ours(model: ModelSection, rule: TensorMapping, parts: Sequence[Tensor]) -> Tensor:
    """Convert Hugging Face's tensors to one parameter of megasdc.

    Args:
        rule: its rule; not of ``Form.ZERO``.
        parts: their tensors, in the rule's order.
    """
    if rule.form is Form.QKV_JOINED:
        return join_qkv(model, *_turned(parts[0]).chunk(3))
    if rule.form is Form.QKV_APART:
        return join_qkv(model, *parts)
    if rule.form is Form.GATE_UP:
        return torch.cat(list(parts))
    return parts[0].T if rule.form is Form.TRANSPOSED else parts[0]


def shape_of_ours(model: ModelSection, rule: TensorMapping, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of one parameter of megasdc, from those of Hugging Face's tensors; arguments as in ``to_ours``."""
    return tuple(to_ours(model, rule, [torch.empty(*shape, device="meta") for shape in shapes]).shape)


def split_qkv(model: ModelSection, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, [n d, ...] and twice [g d, ...], of Megatron-core's interleaved tensor [(n + 2 g) d, ...].

    ``whole`` has for each of g groups its query heads, its key head, its value head, each of width d.
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
    """The transpose of a matrix; a vector unchanged."""
    return tensor.T if tensor.dim() == 2 else tensor
