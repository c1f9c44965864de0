"""Mapping between megasdc's GPT and Hugging Face models, both ways: names, tensor layouts, configurations.

Pure functions over whole (unsharded) tensors with the real rows of the vocabulary; every ``model`` is the resolved
section. Our names are those of ``megasdc.model.sharding``; theirs those of ``GPT2LMHeadModel`` and
``LlamaForCausalLM``.
"""

from megasdc.model.hf.classes import HfClass, hf_class, hf_config
from megasdc.model.hf.fields import architecture, model_fields, special_token_ids, vocabulary
from megasdc.model.hf.tensors import (
    Form,
    Rule,
    from_hf,
    hf_shapes,
    join_qkv,
    num_pipeline_layers,
    rules,
    shape_of_ours,
    split_qkv,
    to_hf,
    to_ours,
)

__all__ = [
    "Form",
    "HfClass",
    "Rule",
    "architecture",
    "from_hf",
    "hf_class",
    "hf_config",
    "hf_shapes",
    "join_qkv",
    "model_fields",
    "num_pipeline_layers",
    "rules",
    "shape_of_ours",
    "special_token_ids",
    "split_qkv",
    "to_hf",
    "to_ours",
    "vocabulary",
]
