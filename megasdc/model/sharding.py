"""Catalogue of a model's parameters and how tensor parallelism splits each, for every layout.

Names are those of the pipeline (``2.layer.mlp.linear_fc1.weight``); the first number is the layer's index in the
pipeline, which does not depend on the layout. Conversion, export and import all read this catalogue; a test compares it
with the parameters that the ranks of a real model hold.

DeepSpeed's universal checkpoints (``deepspeed.checkpoint.ds_to_universal``, 0.19) read from the checkpoint how to join
tensor shards and split them again: ``universal_checkpoint_info``, lists of regular expressions, matched from the start
of a parameter's name. A parameter on no list is joined along dimension 0. A wrong list is often not detected (gated
weights would get another order of rows), so the lists are made only from this catalogue.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megasdc.config.model import ModelSection

LEADING_LAYERS = 2
"""Pipeline layers before the first transformer layer: word embedding, positions."""
TIED_EMBEDDING = "tied_modules.embedding.word_embeddings.weight"
"""The only parameter shared by two stages, in a model with tied embeddings."""


class Split(Enum):
    """Kinds of a parameter's split over tensor ranks."""

    REPLICATED = "every tensor rank has all of it"
    COLUMN = "dimension 0, one run of rows a rank"
    ROW = "dimension 1, one run of columns a rank"
    GATED = "dimension 0 of [gate; up], of each half one run of rows a rank"
    VOCABULARY = "dimension 0, one run of vocabulary entries a rank, the padding at the end"


def parameter_splits(model: ModelSection) -> dict[str, Split]:
    """Split of every parameter of the whole model, in pipeline order.

    Args:
        model: the resolved section, with backend ``torch`` or ``transformer_engine``.
    """
    splits: dict[str, Split] = {
        TIED_EMBEDDING if model.tie_embeddings else "0.word_embeddings.weight": Split.VOCABULARY
    }
    if model.position_embedding == "learned":
        splits["1.positions.weight"] = Split.REPLICATED
    for index in range(LEADING_LAYERS, LEADING_LAYERS + model.num_layers):
        splits |= {f"{index}.layer.{name}": split for name, split in layer_splits(model).items()}
    last = LEADING_LAYERS + model.num_layers
    splits |= {f"{last}.norm.{kind}": Split.REPLICATED for kind in _norm_parameters(model)}
    if not model.tie_embeddings:
        splits[f"{last + 1}.output.weight"] = Split.VOCABULARY
    return splits


def layer_splits(model: ModelSection) -> dict[str, Split]:
    """Splits of one transformer layer's parameters, by the names of Megatron-core's ``TransformerLayer``."""
    norm = _norm_parameters(model)
    fused = model.backend == "transformer_engine"  # its linear layers include the preceding norms
    first, second = (
        ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
        if fused
        else (
            "input_layernorm.",
            "pre_mlp_layernorm.",
        )
    )
    splits = {f"{first}{kind}": Split.REPLICATED for kind in norm}
    splits["self_attention.linear_proj.weight"] = Split.ROW
    if model.bias:
        splits["self_attention.linear_proj.bias"] = Split.REPLICATED
    splits["self_attention.linear_qkv.weight"] = Split.COLUMN
    if model.bias or model.qkv_bias:
        splits["self_attention.linear_qkv.bias"] = Split.COLUMN
    if model.megatron.get("qk_layernorm"):
        splits |= {f"self_attention.{which}_layernorm.{kind}": Split.REPLICATED for which in "qk" for kind in norm}
    splits |= {f"{second}{kind}": Split.REPLICATED for kind in norm}
    inner = Split.GATED if model.gated_mlp else Split.COLUMN
    splits["mlp.linear_fc1.weight"] = inner
    if model.bias:
        splits["mlp.linear_fc1.bias"] = inner
    splits["mlp.linear_fc2.weight"] = Split.ROW
    if model.bias:
        splits["mlp.linear_fc2.bias"] = Split.REPLICATED
    return splits


def torch_name(name: str) -> str:
    """Name with backend ``torch`` of a parameter of any backend.

    Transformer Engine's linear layers include the preceding norms.
    """
    fused = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    for theirs, ours in fused.items():
        name = name.replace(theirs, ours)
    return name


def split_name(name: str) -> tuple[int, str]:
    """Index of a parameter's layer in the pipeline, and its name in that layer; the tied embedding is in layer 0."""
    if name == TIED_EMBEDDING:
        return 0, "word_embeddings.weight"
    index, _, rest = name.partition(".")
    return int(index), rest


def join_shards(shards: Sequence[Tensor], split: Split) -> Tensor:
    """Join the shards of all tensor ranks.

    Args:
        shards: one per tensor rank, in order.
        split: kind of their split.

    Returns:
        The unsharded parameter, the vocabulary with its padding.

    Raises:
        ValueError: replicated copies are not equal.
    """
    if split is Split.REPLICATED:
        for rank, other in enumerate(shards[1:], 1):
            if not torch.equal(other, shards[0]):
                raise ValueError(f"tensor ranks 0 and {rank} hold different copies")
        return shards[0]
    if split is Split.GATED:
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves], 0)
    return torch.cat(list(shards), 1 if split is Split.ROW else 0)


def shard_of(whole: Tensor, split: Split, tensor: int, tp_rank: int) -> Tensor:
    """The shard of a parameter for one tensor rank; the reverse of ``join``.

    Args:
        tensor: number of tensor ranks; must divide the dimension.

    Returns:
        A view if the shard is one run of rows or columns, else a copy.
    """
    if split is Split.REPLICATED:
        return whole
    if split is Split.GATED:
        return torch.cat([half.chunk(tensor, 0)[tp_rank] for half in whole.chunk(2, 0)], 0)
    return whole.chunk(tensor, 1 if split is Split.ROW else 0)[tp_rank]


def _norm_parameters(model: ModelSection) -> tuple[str, ...]:
    return ("weight",) if model.normalization == "RMSNorm" else ("weight", "bias")


UNIVERSAL_INFO_KEY = "universal_checkpoint_info"
"""Top-level key of the lists in the file of each stage, as DeepSpeed expects it."""
_VERSION = 0.2  # format of the lists; 0.4 only adds support for shards of unequal widths
_LISTS = {
    Split.REPLICATED: "tp_replicated_parameter_patterns",  # the conversion fails if copies are not bitwise equal
    Split.ROW: "parameter_with_row_parallelism_patterns",
    Split.GATED: "parameter_with_2_sub_params_cat_dim_0",
    Split.VOCABULARY: "vocabulary_parameter_patterns",
}


def universal_info(model: ModelSection, vocab_size: int) -> dict[str, Any]:
    """DeepSpeed's ``universal_checkpoint_info`` of a model, the same on all ranks and in all layouts.

    Each pattern matches whole names only, and at least one parameter; parameters of all transformer layers share one.

    Args:
        model: the resolved section.
        vocab_size: rows of the word embedding, including padding. DeepSpeed cuts off rows beyond it and fills them with
            zeros when it loads; padding does not affect the loss, but its moments would be lost.

    Returns:
        JSON-compatible values, to be saved under ``UNIVERSAL_INFO_KEY``.
    """
    patterns: dict[str, list[str]] = {name: [] for name in _LISTS.values()}
    for name, split in parameter_splits(model).items():
        if split not in _LISTS:
            continue
        pattern, chosen = name_pattern(name), patterns[_LISTS[split]]
        if pattern not in chosen:
            chosen.append(pattern)
    tied = [name_pattern(TIED_EMBEDDING)] if model.tie_embeddings else []
    return {
        "universal_checkpoint_version": _VERSION,
        "original_vocab_size": vocab_size,
        "pipeline_replicated_parameter_patterns": tied,
        **patterns,
    }


def name_pattern(name: str) -> str:
    """A pattern for one parameter, or for the same parameter of all transformer layers.

    ``name``: as in ``parameter_splits``, such as ``2.layer.mlp.linear_fc1.weight``.
    """
    first, dot, rest = name.partition(".layer.")
    if dot and first.isdigit():
        return rf"\d+\.layer\.{re.escape(rest)}$"
    return re.escape(name) + "$"
