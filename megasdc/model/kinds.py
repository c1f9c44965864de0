"""Kinds of submodules, and the kind of a full name; imports no torch, so that files can be read without it."""

from __future__ import annotations

EMBEDDING, POSITIONS, NORM, QKV, CORE_ATTENTION = "embedding", "positions", "norm", "qkv", "core_attention"
PROJECTION, RESIDUAL, FC1, ACTIVATION, FC2 = "projection", "residual", "fc1", "activation", "fc2"
BLOCK, FINAL_NORM, HEAD, LOSS = "block", "final_norm", "head", "loss"
KINDS = (
    EMBEDDING,
    POSITIONS,
    NORM,
    QKV,
    CORE_ATTENTION,
    PROJECTION,
    RESIDUAL,
    FC1,
    ACTIVATION,
    FC2,
    BLOCK,
    FINAL_NORM,
    HEAD,
    LOSS,
)
"""Kinds of submodules, in order of execution; ``block`` is the second residual sum, the result of a whole layer."""

_LAYER = frozenset({EMBEDDING, POSITIONS, BLOCK, FINAL_NORM, HEAD, LOSS})
GRANULARITIES: dict[str, frozenset[str]] = {
    "layer": _LAYER,
    "submodule": _LAYER | {NORM, CORE_ATTENTION, PROJECTION, RESIDUAL, ACTIVATION, FC2},
    "gemm": frozenset(KINDS),
}
"""Kinds of submodules that each granularity observes; each contains the one before."""

LOSS_FQN = "loss"
WORD_EMBEDDINGS, POSITION_EMBEDDING, LAST_NORM, OUTPUT = "word_embeddings", "positions", "norm", "output"
BLOCK_PARTS = {
    "input_layernorm": NORM,
    "self_attention.linear_qkv": QKV,
    "self_attention.q_layernorm": NORM,
    "self_attention.k_layernorm": NORM,
    "self_attention.core_attention": CORE_ATTENTION,
    "self_attention.linear_proj": PROJECTION,
    "self_attn_bda": RESIDUAL,
    "pre_mlp_layernorm": NORM,
    "mlp.linear_fc1": FC1,
    "mlp.activation": ACTIVATION,
    "mlp.linear_fc2": FC2,
    "mlp_bda": BLOCK,
}
"""Kind of each part of a transformer layer, by its name below ``layer``."""
_BY_NAME = {
    LOSS_FQN: LOSS,
    WORD_EMBEDDINGS: EMBEDDING,
    POSITION_EMBEDDING: POSITIONS,
    LAST_NORM: FINAL_NORM,
    OUTPUT: HEAD,
    **{f"layer.{name}": kind for name, kind in BLOCK_PARTS.items()},
}


def submodule_kind(fqn: str) -> str:
    """The kind of a submodule.

    Args:
        fqn: full name, as from ``model.submodules.list_submodules``.

    Raises:
        ValueError: no submodule has such a name.
    """
    name = fqn.split(".", 1)[1] if fqn[:1].isdigit() and "." in fqn else fqn
    if name not in _BY_NAME:
        raise ValueError(f"{fqn!r} is the name of no submodule; the last part is one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
