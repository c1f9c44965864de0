"""DeepSpeed's ``universal_checkpoint_info``: how to join tensor shards and split them again.

DeepSpeed's universal checkpoints (``deepspeed.checkpoint.ds_to_universal``, 0.19) read it from the checkpoint: lists of
regular expressions, matched from the start of a parameter's name. A parameter on no list is joined along dimension 0. A
wrong list is often not detected (gated weights would get another order of rows), so the lists are made only from the
catalogue of ``megasdc.model.sharding``.
"""

from __future__ import annotations

import re
from typing import Any

from megasdc.config.sections.model import ModelSection
from megasdc.model.sharding import TIED_EMBEDDING, Split, parameter_splits

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
