"""Fields that `model.megatron` may set, read from Megatron-core's source, so that neither it nor torch is imported."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megasdc.config.sections.model import ModelSection
from megasdc.config.table import json_type_text

_RECOMPUTE = "set pipeline.activation_checkpoint_interval instead"
_DTYPE = "set bf16.enabled or fp16.enabled instead"

REFUSED_FIELDS: dict[str, str] = {
    "num_layers": "set megasdc.model.num_layers instead",
    "hidden_size": "set megasdc.model.hidden_size instead",
    "num_attention_heads": "set megasdc.model.num_attention_heads instead",
    "num_query_groups": "set megasdc.model.num_query_groups instead",
    "kv_channels": "set megasdc.model.kv_channels instead",
    "ffn_hidden_size": "set megasdc.model.ffn_hidden_size instead",
    "normalization": "set megasdc.model.normalization instead",
    "layernorm_epsilon": "set megasdc.model.norm_epsilon instead",
    "activation_func": "set megasdc.model.activation instead",
    "gated_linear_unit": "set megasdc.model.gated_mlp instead",
    "add_bias_linear": "set megasdc.model.bias instead",
    "add_qkv_bias": "set megasdc.model.qkv_bias instead",
    "hidden_dropout": "set megasdc.model.hidden_dropout instead",
    "attention_dropout": "set megasdc.model.attention_dropout instead",
    "init_method_std": "set megasdc.model.init_std instead",
    "tensor_model_parallel_size": "set megasdc.parallel.tensor instead",
    "pipeline_model_parallel_size": "set megasdc.parallel.pipeline instead",
    "sequence_parallel": "set megasdc.parallel.sequence_parallel instead",
    "params_dtype": _DTYPE,
    "pipeline_dtype": _DTYPE,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "use_cpu_initialization": "initial weights must not depend on the layout, so it is always on",
    "perform_initialization": "it is always on",
    "num_moe_experts": "megasdc trains dense models",
    "context_parallel_size": "sequences are split over tensor ranks only, by megasdc.parallel.sequence_parallel",
    "virtual_pipeline_model_parallel_size": "each stage holds one run of layers",
    "recompute_granularity": _RECOMPUTE,
    "recompute_method": _RECOMPUTE,
    "recompute_num_layers": _RECOMPUTE,
    "gradient_accumulation_fusion": "DeepSpeed accumulates gradients",
    "fp8": "it is not supported",
    "multi_latent_attention": "it is not supported",
}
"""Fields of TransformerConfig that `model.megatron` must not set, with the remedy or reason."""

TORCH_FIELDS = frozenset(
    {
        "activation_func_clamp_value",  # MLP, inside the gate
        "deterministic_mode",  # VocabParallelEmbedding, lookup
        "glu_linear_offset",  # MLP, inside the gate
        "no_rope_freq",  # Attention, which layers rotate
        "qk_layernorm",  # our layer_spec
        "softmax_scale",  # Attention passes it to our TorchAttention
    }
)
"""Fields that have an effect with backend torch (Megatron-core 0.16: read by the named module). Most others are read by
modules that megasdc replaces, or need kernels that backend torch does not have."""

NEEDS: dict[str, tuple[str, Any]] = {
    "activation_func_clamp_value": ("gated_mlp", True),
    "glu_linear_offset": ("gated_mlp", True),
    "no_rope_freq": ("position_embedding", "rope"),
}
"""Fields that, with backend torch, have an effect only with this value of this field of `megasdc.model`."""


_FLOAT32_MAX = 3.4028234e38
VALUES: dict[str, Any] = {
    "activation_func_clamp_value": Annotated[float, Field(gt=0, le=_FLOAT32_MAX)] | None,
    "deterministic_mode": bool,
    "glu_linear_offset": Annotated[float, Field(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX)],
    "no_rope_freq": Annotated[int, Field(gt=0)] | list[Literal[0, 1]] | None,
    "qk_layernorm": bool,
    "softmax_scale": float | None,
}
"""Allowed values of the fields of backend torch."""


def _value_problem(name: str, value: Any, layers: int) -> str | None:
    """Problem of the value of a field of backend torch; None: there is none."""
    try:
        TypeAdapter(VALUES[name], config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return f"allowed: {json_type_text(VALUES[name])}"
    if name == "no_rope_freq" and isinstance(value, list) and value and len(value) != layers:
        return f"the list has {len(value)} entries; needed: one for each of the {layers} layers"
    if name == "no_rope_freq" and isinstance(value, int) and layers % value:
        return f"it does not divide megasdc.model.num_layers {layers}; choose another"
    return None


def megatron_problems(model: ModelSection) -> dict[str, str]:
    """Problems of the names in `model.megatron`, by name; those with a field of their own are refused too.

    Values of fields that are not in `VALUES` are checked by Megatron-core when the model is built. Without
    Megatron-core on this machine, unknown names cannot be detected and pass.
    """
    known = megatron_fields()
    wrong = {}
    for name in model.megatron:
        if name in REFUSED_FIELDS:
            wrong[name] = REFUSED_FIELDS[name]
        elif known and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else "see megatron/core/transformer/transformer_config.py"
            wrong[name] = f"Megatron-core's TransformerConfig has no such field; {hint}"
        elif known and model.backend == "torch" and name not in TORCH_FIELDS:
            wrong[name] = (
                "it has no effect or is not supported with megasdc.model.backend torch, where these can be set: "
                f"{', '.join(sorted(TORCH_FIELDS))}; remove it or choose another backend"
            )
        elif model.backend == "torch" and name in NEEDS and getattr(model, NEEDS[name][0]) != NEEDS[name][1]:
            field, value = NEEDS[name]
            wrong[name] = f"it has effect only with megasdc.model.{field} {json.dumps(value)}; set that or remove it"
        elif name in VALUES and (reason := _value_problem(name, model.megatron[name], model.num_layers)):
            wrong[name] = reason
    return wrong


@cache
def megatron_fields() -> frozenset[str]:
    """Names of the fields of Megatron-core's TransformerConfig; empty where Megatron-core is not installed."""
    spec = importlib.util.find_spec("megatron")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        core = Path(root, "core")
        files = (core / "transformer" / "transformer_config.py", core / "model_parallel_config.py")
        if all(file.is_file() for file in files):
            return frozenset(name for file in files for name in _annotated_names(file))
    return frozenset()


def _annotated_names(file: Path) -> list[str]:
    return [
        line.target.id
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("TransformerConfig", "ModelParallelConfig")
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
