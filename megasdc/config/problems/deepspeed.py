"""Contradictions between DeepSpeed's keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megasdc.common.imports.packages import is_installed
from megasdc.config.deepspeed_keys import SCHEDULER_PARAMS
from megasdc.config.deepspeed_part import precision_of
from megasdc.config.problems.problem import Problem


def deepspeed_problems(deepspeed: dict[str, Any], given: dict[str, Any]) -> Iterator[Problem]:
    """Yield every contradiction in DeepSpeed's keys with defaults; ``given`` are those of the user, without them."""
    yield from _precision_problems(deepspeed, given)
    yield from _monitor_problems(deepspeed)
    yield from _optimizer_problems(deepspeed)
    yield from _scheduler_problems(deepspeed)


def _precision_problems(deepspeed: dict[str, Any], given: dict[str, Any]) -> Iterator[Problem]:
    if "bf16" in given and "bfloat16" in given:
        yield Problem(("bfloat16", "bf16"), "is the old name of bf16, which is given too; remove bfloat16.")
    bf16 = deepspeed.get("bf16", {})
    if bf16.get("enabled") and deepspeed.get("fp16", {}).get("enabled"):
        yield Problem(
            ("bf16.enabled", "fp16.enabled"),
            "got true together with fp16.enabled true; switch one of them off.",
        )
        return
    if bf16.get("bf16_optimizer_states") and not bf16.get("bf16_master_weights_and_grads"):
        yield Problem(
            ("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
            "got true; it needs bf16.bf16_master_weights_and_grads true.",
        )
    precision = precision_of(deepspeed)
    kind = deepspeed.get("data_types", {}).get("grad_accum_dtype")
    allowed = ("fp32", "bf16") if precision == "bf16" else (precision,)
    if kind is not None and kind not in allowed:
        yield Problem(
            ("data_types.grad_accum_dtype", "bf16.enabled", "fp16.enabled"),
            f'got "{kind}" with a model in {precision}; allowed: ' + " or ".join(f'"{name}"' for name in allowed) + ".",
        )
    # With offload, DeepSpeed uses its ZeRO optimizer instead of BF16_Optimizer. It keeps gradients of another dtype
    # than the model's in param.grad_accum, which neither its sum of tied weights nor ours over tensor ranks includes.
    # The last check below refuses this.
    offload = deepspeed["zero_optimization"].get("offload_optimizer")
    device = offload.get("device", "none") if offload else "none"
    yield from _master_problems(deepspeed, precision, device != "none")
    bucket = deepspeed["zero_optimization"].get("allgather_bucket_size", 0)
    if bucket % 2 and (precision, kind) != ("bf16", "fp32"):
        yield Problem(
            ("zero_optimization.allgather_bucket_size", "bf16.enabled", "data_types.grad_accum_dtype"),
            f"got {bucket}; DeepSpeed needs an even number.",
        )
    if precision == "bf16" and kind == "fp32" and device != "none":
        yield Problem(
            ("data_types.grad_accum_dtype", "zero_optimization.offload_optimizer", "bf16.enabled"),
            '"fp32" (given or by default) with a model in bf16 cannot be combined with '
            f'zero_optimization.offload_optimizer.device "{device}"; set grad_accum_dtype "bf16" or remove '
            "offload_optimizer.",
        )


def _master_problems(deepspeed: dict[str, Any], precision: str, offloads: bool) -> Iterator[Problem]:
    """Master weights in 16 bits, which DeepSpeed's ZeRO optimizer supports only with offload and its own CPU Adam."""
    key = f"{precision}_master_weights_and_grads"
    section = deepspeed.get(precision, {})
    if not section.get(key) or deepspeed.get("data_types", {}).get("grad_accum_dtype") == "fp32":
        return
    states_too = section.get("bf16_optimizer_states") and not offloads
    if not states_too and (not offloads or deepspeed["optimizer"]["params"]["torch_adam"]):
        other = "set bf16.bf16_optimizer_states true without offload, " if precision == "bf16" else ""
        yield Problem(
            (f"{precision}.{key}", "zero_optimization.offload_optimizer", "optimizer.params.torch_adam"),
            f'got true with data_types.grad_accum_dtype "{precision}"; it needs '
            'zero_optimization.offload_optimizer.device "cpu" and optimizer.params.torch_adam false; set both, '
            f"{other}or remove it.",
        )


MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""The package that each of DeepSpeed's monitors imports."""


def _monitor_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    for key, package in MONITORS.items():
        if deepspeed.get(key, {}).get("enabled") and not is_installed(package):
            yield Problem(
                (f"{key}.enabled",),
                f"got true, but the package {package} is not installed; run `pip install {package}` on every host, or "
                "remove it.",
            )


def _optimizer_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    params = deepspeed["optimizer"]["params"]
    base = "optimizer.params"
    if params["torch_adam"]:
        if "bias_correction" in params:
            yield Problem(
                (f"{base}.bias_correction", f"{base}.torch_adam"),
                "PyTorch's AdamW always corrects the bias; remove it or set torch_adam false.",
            )
        if params.get("fused") and params.get("foreach"):
            yield Problem(
                (f"{base}.foreach", f"{base}.fused"),
                "got true together with fused true; PyTorch takes one of them.",
            )
    else:
        for key in ("fused", "foreach"):
            if key in params:
                yield Problem(
                    (f"{base}.{key}", f"{base}.torch_adam"),
                    "is for PyTorch's optimizer, but torch_adam is false; remove it.",
                )


def _scheduler_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    kind, params = deepspeed["scheduler"]["type"], deepspeed["scheduler"]["params"]
    allowed = SCHEDULER_PARAMS[kind]
    for key in sorted(set(params) - allowed):
        path = f"scheduler.params.{key}"
        yield Problem((path, "scheduler.type"), f"{kind} does not take it; allowed: {', '.join(sorted(allowed))}.")
