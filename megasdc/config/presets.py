"""Presets of model sizes: fields of the `model` section, from 1 M to 70 B parameters.

Sources: GPT-2 sizes from Radford et al. 2019; Llama sizes from Touvron et al. 2023 (arXiv 2302.13971, 2307.09288) and
the Llama 3 herd (arXiv 2407.21783); the ``pei-`` sizes from Pei, Lausen, Karypis 2025 (IEEE Micro,
10.1109/MM.2025.3642709), which does not give head counts: heads of 128 channels are assumed.
"""

from __future__ import annotations

from typing import Any

_GPT2: dict[str, Any] = {
    "position_embedding": "learned",
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "gated_mlp": False,
    "bias": True,
    "tie_embeddings": True,
    "max_positions": 1024,
}
_LLAMA: dict[str, Any] = {
    "position_embedding": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_mlp": True,
    "bias": False,
    "tie_embeddings": False,
    "max_positions": 4096,
}


def _sizes(layers: int, hidden: int, heads: int, groups: int | None = None, ffn: int | None = None) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    if groups is not None:
        sizes["num_query_groups"] = groups
    if ffn is not None:
        sizes["ffn_hidden_size"] = ffn
    return sizes


_LLAMA3: dict[str, Any] = {**_LLAMA, "max_positions": 8192, "rotary_base": 500000}
_PEI: dict[str, Any] = {**_GPT2, "max_positions": 2048}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-1m": {**_GPT2, **_sizes(4, 128, 4)},
    "gpt2-10m": {**_GPT2, **_sizes(6, 320, 5)},
    "gpt2-124m": {**_GPT2, **_sizes(12, 768, 12)},
    "gpt2-355m": {**_GPT2, **_sizes(24, 1024, 16)},
    "gpt2-774m": {**_GPT2, **_sizes(36, 1280, 20)},
    "gpt2-1.5b": {**_GPT2, **_sizes(48, 1600, 25)},
    "llama-1m": {**_LLAMA, **_sizes(4, 128, 4, 2)},
    "llama-10m": {**_LLAMA, **_sizes(8, 256, 8, 4)},
    "llama-125m": {**_LLAMA, **_sizes(12, 768, 12, 12)},
    "llama-350m": {**_LLAMA, **_sizes(24, 1024, 16, 16)},
    "llama-1b": {**_LLAMA3, **_sizes(16, 2048, 32, 8, 8192), "tie_embeddings": True},
    "llama-3b": {**_LLAMA3, **_sizes(28, 3072, 24, 8, 8192), "tie_embeddings": True},
    "llama-7b": {**_LLAMA, **_sizes(32, 4096, 32, 32, 11008)},
    "llama-8b": {**_LLAMA3, **_sizes(32, 4096, 32, 8, 14336)},
    "llama-13b": {**_LLAMA, **_sizes(40, 5120, 40, 40, 13824)},
    "llama-70b": {**_LLAMA3, **_sizes(80, 8192, 64, 8, 28672)},
    "pei-h2304-l24": {**_PEI, **_sizes(24, 2304, 18)},
    "pei-h4096-l24": {**_PEI, **_sizes(24, 4096, 32)},
    "pei-h6144-l12": {**_PEI, **_sizes(12, 6144, 48)},
}
