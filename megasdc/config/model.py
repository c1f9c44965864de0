"""Section of the model, presets of its sizes, and the fields of Megatron-core's that it may set besides.

Presets are fields of the `model` section, from 1 M to 70 B parameters. Sources: GPT-2 sizes from Radford et al. 2019;
Llama sizes from Touvron et al. 2023 (arXiv 2302.13971, 2307.09288) and the Llama 3 herd (arXiv 2407.21783); the
``pei-`` sizes from Pei, Lausen, Karypis 2025 (IEEE Micro, 10.1109/MM.2025.3642709), which does not give head counts:
heads of 128 channels are assumed.

Fields that `model.megatron` may set are read from Megatron-core's source, so that neither it nor torch is imported.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megasdc.config.fields import (
    FLAG,
    NO_MATTER,
    REFUSED,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    json_type_text,
    setting,
)


class ModelSection(Section):
    """The GPT to train: a preset, single sizes, or a preset with some sizes changed."""

    preset: str | None = setting(None, "Name of a preset size; null: sizes are given field by field.", NO_MATTER)
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = setting(2, "Number of transformer layers.", REFUSED)
    hidden_size: PositiveInt = setting(128, "Width h of the residual stream.", REFUSED)
    num_attention_heads: PositiveInt = setting(4, "Number of query heads.", REFUSED)
    num_query_groups: PositiveInt | None = setting(
        None, "Number of key/value heads (grouped-query attention); null: as many as query heads.", REFUSED
    )
    kv_channels: PositiveInt | None = setting(
        None, "Width of one head; null: hidden_size / num_attention_heads.", REFUSED
    )
    ffn_hidden_size: PositiveInt | None = setting(
        None, "Width of the MLP; null: 4 h, or with a gated MLP 8/3 h rounded up to a multiple of 64.", REFUSED
    )
    max_positions: PositiveInt = setting(
        2048, "Longest sequence the model can see, in tokens; size of the learned position table.", FLAG
    )
    position_embedding: Literal["learned", "rope"] = setting("learned", "Kind of position information.", REFUSED)
    rotary_base: PositiveInt = setting(10000, "Base of the rotary frequencies; read with rope only.", FLAG)
    normalization: Literal["LayerNorm", "RMSNorm"] = setting("LayerNorm", "Kind of normalisation.", REFUSED)
    norm_epsilon: PositiveFloat = setting(1e-5, "Added to the variance in every normalisation.", FLAG)
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = setting(
        "gelu_tanh", "MLP activation; gelu_tanh is GPT-2's tanh approximation of GELU.", FLAG
    )
    gated_mlp: bool = setting(False, "Gate the MLP; silu with a gate is SwiGLU.", REFUSED)
    bias: bool = setting(True, "Biases in the linear layers of attention and MLP.", REFUSED)
    qkv_bias: bool = setting(False, "A bias on query, key and value also where `bias` is false.", REFUSED)
    tie_embeddings: bool = setting(True, "Output weights are the word embedding.", REFUSED)
    hidden_dropout: Probability = setting(0.0, "Dropout on embeddings and residual branches, in [0, 1).", FLAG)
    attention_dropout: Probability = setting(
        0.0, "Dropout on attention probabilities, in [0, 1); above 0 attention is computed unfused.", FLAG
    )
    init_std: PositiveFloat = setting(0.02, "Standard deviation of initial weights.", FLAG)
    vocab_multiple: PositiveInt = setting(
        128, "The vocabulary is padded to a multiple of this; must be divisible by every tensor size used.", FLAG
    )
    backend: Literal["torch", "transformer_engine"] = setting(
        "torch", "Submodules from plain PyTorch (CPU and GPU) or from Transformer Engine (GPU, installed apart).", FLAG
    )
    fuse: bool = setting(
        False,
        "Norms, rotary embedding, activation, residual sums and cross-entropy compiled, each alone; needs backend "
        "torch and a C++ compiler (on a GPU Triton and a C compiler).",
        FLAG,
    )
    initial_weights: str | None = setting(
        None,
        "Folder made by `megasdc import-hf`, a checkpoint of any layout, or a folder of checkpoints (the newest whole "
        "one is taken); its weights alone are used, at step 0 only; null: random weights.",
        NO_MATTER,
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of Megatron-core's TransformerConfig that have effect, by name; applied last.",
        json_schema_extra=FLAG,
    )


def head_width(model: ModelSection) -> int:
    """Width of one attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def query_groups(model: ModelSection) -> int:
    """Number of key/value heads."""
    return model.num_query_groups or model.num_attention_heads


def ffn_width(model: ModelSection) -> int:
    """Width of the MLP: as given, else 4 h, or with a gate 8/3 h rounded up to a multiple of 64."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    return -(-8 * model.hidden_size // (3 * 64)) * 64 if model.gated_mlp else 4 * model.hidden_size


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


_RECOMPUTE = "set pipeline.activation_checkpoint_interval instead"
_DTYPE = "set bf16.enabled or fp16.enabled instead"

REFUSED_MEGATRON_FIELDS: dict[str, str] = {
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

MEGATRON_NEEDS: dict[str, tuple[str, Any]] = {
    "activation_func_clamp_value": ("gated_mlp", True),
    "glu_linear_offset": ("gated_mlp", True),
    "no_rope_freq": ("position_embedding", "rope"),
}
"""Fields that, with backend torch, have an effect only with this value of this field of `megasdc.model`."""


_FLOAT32_MAX = 3.4028234e38
MEGATRON_VALUES: dict[str, Any] = {
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
        TypeAdapter(MEGATRON_VALUES[name], config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return f"allowed: {json_type_text(MEGATRON_VALUES[name])}"
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
        if name in REFUSED_MEGATRON_FIELDS:
            wrong[name] = REFUSED_MEGATRON_FIELDS[name]
        elif known and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else "see megatron/core/transformer/transformer_config.py"
            wrong[name] = f"Megatron-core's TransformerConfig has no such field; {hint}"
        elif known and model.backend == "torch" and name not in TORCH_FIELDS:
            wrong[name] = (
                "it has no effect or is not supported with megasdc.model.backend torch, where these can be set: "
                f"{', '.join(sorted(TORCH_FIELDS))}; remove it or choose another backend"
            )
        elif (
            model.backend == "torch"
            and name in MEGATRON_NEEDS
            and getattr(model, MEGATRON_NEEDS[name][0]) != MEGATRON_NEEDS[name][1]
        ):
            field, value = MEGATRON_NEEDS[name]
            wrong[name] = f"it has effect only with megasdc.model.{field} {json.dumps(value)}; set that or remove it"
        elif name in MEGATRON_VALUES and (reason := _value_problem(name, model.megatron[name], model.num_layers)):
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
