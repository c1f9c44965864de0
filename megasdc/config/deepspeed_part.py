"""DeepSpeed's part of a configuration: defaults of its keys, and their effect."""

from __future__ import annotations

import copy
from typing import Any, Literal

from megasdc.config.fields import LARGEST_INTEGER
from megasdc.config.sections.deepspeed import OptimizerParams

SILENT_STEPS_PER_PRINT = 10**9
"""Default that turns DeepSpeed's own progress line off: megasdc prints its own."""


def fill_defaults(given: dict[str, Any], steps: int, node_local: bool) -> dict[str, Any]:
    """A copy of DeepSpeed's part with defaults filled in, so that a run with sizes and a data path trains safely.

    A default does not depend on whether neighbouring keys are given; the resolved file shows it. Several differ from
    DeepSpeed's own: warm-up is linear (log reaches half of the peak within a few steps), its length depends on that of
    the run, and WarmupDecayLR peaks at the optimizer's lr, not at 0.001. Batch sizes that depend on the world size stay
    absent.
    """
    part: dict[str, Any] = large_as_floats(given)
    if "bfloat16" in part:
        part["bf16"] = part.pop("bfloat16")
    if not ("train_batch_size" in part and "gradient_accumulation_steps" in part):
        part.setdefault("train_micro_batch_size_per_gpu", 1)
    if "train_batch_size" not in part:
        part.setdefault("gradient_accumulation_steps", 1)
    part.setdefault("zero_optimization", {}).setdefault("stage", 1)
    part.setdefault("gradient_clipping", 1.0)
    if part.get("steps_per_print") is None:
        part["steps_per_print"] = SILENT_STEPS_PER_PRINT
    part.setdefault("checkpoint", {}).setdefault("use_node_local_storage", node_local)
    precision = precision_of(part)
    if precision != "fp32" and part.get("data_types", {}).get("grad_accum_dtype") is None:
        part.setdefault("data_types", {})["grad_accum_dtype"] = "fp32" if precision == "bf16" else "fp16"
    lr = _fill_optimizer(part.setdefault("optimizer", {}))
    _fill_scheduler(part.setdefault("scheduler", {}), lr, steps)
    return part


def large_as_floats(value: Any) -> Any:
    """Copy; integers above ``LARGEST_INTEGER``, which only floating-point fields accept, become floats for tensors."""
    if isinstance(value, dict):
        return {key: large_as_floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [large_as_floats(inner) for inner in value]
    return float(value) if isinstance(value, int) and abs(value) > LARGEST_INTEGER else value


def precision_of(deepspeed: dict[str, Any]) -> Literal["fp32", "bf16", "fp16"]:
    """Dtype in which the model trains, from DeepSpeed's part of the configuration."""
    if deepspeed.get("bf16", deepspeed.get("bfloat16", {})).get("enabled", False):
        return "bf16"
    return "fp16" if deepspeed.get("fp16", {}).get("enabled", False) else "fp32"


def _fill_optimizer(optimizer: dict[str, Any]) -> float:
    optimizer.setdefault("type", "AdamW")
    params = optimizer.setdefault("params", {})
    for key in ("lr", "betas", "eps", "weight_decay", "torch_adam"):
        params.setdefault(key, copy.copy(OptimizerParams.model_fields[key].default))
    if params["torch_adam"] and not params.get("foreach"):
        params.setdefault("fused", True)
    return float(params["lr"])


def _fill_scheduler(scheduler: dict[str, Any], lr: float, steps: int) -> None:
    kind = scheduler.setdefault("type", "WarmupCosineLR")
    params = scheduler.setdefault("params", {})
    if kind != "WarmupLR":
        params.setdefault("total_num_steps", steps)
    params.setdefault("warmup_num_steps", max(1, min(2000, steps // 10)))
    params.setdefault("warmup_type", "linear")
    if kind == "WarmupCosineLR":
        params.setdefault("cos_min_ratio", 0.1)
    else:
        params.setdefault("warmup_max_lr", lr)
