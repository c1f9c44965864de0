"""Styles of models, as parts of section `model`."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "position_embedding": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_mlp": True,
    "bias": False,
    "tie_embeddings": False,
}
"""A model as Llama has it."""
