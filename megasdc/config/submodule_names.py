"""Submodules of the whole model, and the observable results of each: names, without building the model.

A rank holds one stage only; this catalogue covers all stages. A test compares it with the observations of ranks of real
models.
"""

from __future__ import annotations

from megasdc.common.addresses import (
    ACCUMULATED_GRAD,
    BACKWARD,
    FORWARD,
    PARAMETER,
    RECOMPUTE,
    REDUCED_GRAD,
    UPDATE,
    WEIGHT_GRAD,
)
from megasdc.config.sections.faults import CLIPPED_GRAD, COLLECTIVE, COPY, OPTIMIZER_STATE, STATE_AT_REST
from megasdc.config.sections.megasdc import ParallelSection
from megasdc.config.sections.model import ModelSection

STATES = ("master", "exp_avg", "exp_avg_sq")
_BLOCK = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attn_bda",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.activation",
    "mlp.linear_fc2",
    "mlp_bda",
)
_OF_QK_NORM = ("self_attention.q_layernorm", "self_attention.k_layernorm")
_FIRST_BLOCK = 2
_GRADIENT_SLOTS = {"core_attention": ("query", "key", "value"), "word_embeddings": ()}
_LOCAL_TERMS = ("maximum", "predicted", "sum")


def submodule_slots(model: ModelSection, parallel: ParallelSection) -> dict[str, dict[str, tuple[str, ...]]]:
    """Every submodule of the model in forward order, with its slots by phase; phases without slots are omitted."""
    return {name: _slots(name, _parameters(name, model, parallel), parallel) for name in _names(model)}


def parameter_names(model: ModelSection, parallel: ParallelSection) -> list[str]:
    """Full name of every parameter of the model, in forward order; a tied one has the name of the embedding only."""
    own = [fqn for fqn in _names(model) if not (model.tie_embeddings and fqn.endswith(".output"))]
    return [f"{fqn}.{name}" for fqn in own for name in _parameters(fqn, model, parallel)]


def _names(model: ModelSection) -> list[str]:
    block = [name for name in _BLOCK if name not in _OF_QK_NORM or model.megatron.get("qk_layernorm")]
    last = _FIRST_BLOCK + model.num_layers
    blocks = [f"{index}.layer.{name}" for index in range(_FIRST_BLOCK, last) for name in block]
    return ["0.word_embeddings", "1.positions", *blocks, f"{last}.norm", f"{last + 1}.output", "loss"]


def _parameters(fqn: str, model: ModelSection, parallel: ParallelSection) -> tuple[str, ...]:
    name = fqn.rpartition(".")[2]
    if name in ("norm", "input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm"):
        return ("weight",) if model.normalization == "RMSNorm" else ("weight", "bias")
    if name.startswith("linear_"):
        return ("weight", "bias") if model.bias or (model.qkv_bias and name == "linear_qkv") else ("weight",)
    if name == "output":  # a tied one has its own copy only on another stage than the embedding
        return () if model.tie_embeddings and parallel.pipeline == 1 else ("weight",)
    if name == "positions":
        return ("weight",) if model.position_embedding == "learned" else ()
    return ("weight",) if name == "word_embeddings" else ()


def _slots(fqn: str, parameters: tuple[str, ...], parallel: ParallelSection) -> dict[str, tuple[str, ...]]:
    if fqn == "loss":
        return {FORWARD: (*(_LOCAL_TERMS if parallel.tensor > 1 else ()), "output"), BACKWARD: ("input",)}
    states = tuple(f"{parameter}.{state}" for parameter in parameters for state in STATES)
    slots = {
        FORWARD: ("output",),
        RECOMPUTE: ("output",) if ".layer." in fqn else (),
        BACKWARD: _GRADIENT_SLOTS.get(fqn.rpartition(".")[2], ("input",)),
        **dict.fromkeys((WEIGHT_GRAD, ACCUMULATED_GRAD, REDUCED_GRAD, PARAMETER), parameters),
        **dict.fromkeys((COLLECTIVE, CLIPPED_GRAD, COPY), parameters),
        **dict.fromkeys((UPDATE, OPTIMIZER_STATE, STATE_AT_REST), states),
    }
    return {phase: names for phase, names in slots.items() if names}
