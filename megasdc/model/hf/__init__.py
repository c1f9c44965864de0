"""Mapping between megasdc's GPT and Hugging Face models, both ways: names, tensor layouts, configurations.

Pure functions over whole (unsharded) tensors with the real rows of the vocabulary; every ``model`` is the resolved
section. Our names are those of ``megasdc.model.sharding``; theirs those of ``GPT2LMHeadModel`` and
``LlamaForCausalLM``.
"""
