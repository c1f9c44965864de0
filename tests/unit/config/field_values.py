"""Every field of a configuration file, found in the sections' classes, and values that may stand there by mistake.

Used by the tests that put each value into each field: without training (unit) and with (distributed).
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from megasdc.config.fields import element_in, model_in
from megasdc.config.load import WholeFile

Path_ = tuple[str | int, ...]

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "megasdc": {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64},
        "data": {"path": "prepared", "sequence_length": 32},
        "parallel": {"timeout_s": 60.0},
        "protect": "off",
        "training": {"steps": 3, "stop_step": 2},
        "logging": {"run_dir": "run", "interval": 1},
    },
}
"""A tiny run of two steps."""

_DETERMINISTIC = {"megasdc.determinism.enabled": True}
_OFFLOAD = {"zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": False}}
_ISOLATING = {
    "megasdc.checkpoint.memory.interval": 1,
    "megasdc.checkpoint.memory.partners": True,
    "megasdc.checkpoint.other_layout": "convert",
}
CONTEXTS: list[tuple[str, dict[str, Any]]] = [
    ("megasdc.sdc.policy", _ISOLATING),
    ("bf16", {"bf16": {"enabled": True}}),
    ("bfloat16", {"bfloat16": {"enabled": True}}),
    ("fp16", {"fp16": {"enabled": True}}),
    ("data_types", {"bf16": {"enabled": True}}),
    ("communication_data_type", {"bf16": {"enabled": True}}),
    ("pipeline", {"pipeline.activation_checkpoint_interval": 1}),
    ("activation_checkpointing", {"pipeline.activation_checkpoint_interval": 1}),
    ("optimizer.params.bias_correction", {"optimizer.params.torch_adam": False}),
    ("optimizer.params.foreach", {"optimizer.params.fused": False}),
    ("optimizer.params.adam_w_mode", {"optimizer.type": "Adam"}),
    ("scheduler.params.warmup_m", {"scheduler.type": "WarmupLR"}),
    ("zero_optimization.offload_optimizer", _OFFLOAD),
    ("zero_force_ds_cpu_optimizer", _OFFLOAD),
    ("tensorboard", {"tensorboard": {"enabled": True, "output_path": "board"}}),
    ("csv_monitor", {"csv_monitor": {"enabled": True, "output_path": "csv"}}),
    ("comms_logger", {"comms_logger": {"enabled": True}}),
    ("megasdc.model.rotary_base", {"megasdc.model.position_embedding": "rope"}),
    ("megasdc.model.megatron.no_rope_freq", {"megasdc.model.position_embedding": "rope"}),
    ("megasdc.model.megatron.glu_linear_offset", {"megasdc.model.gated_mlp": True}),
    ("megasdc.model.megatron.activation_func_clamp_value", {"megasdc.model.gated_mlp": True}),
    ("megasdc.data.blend", {"megasdc.data.blend": [{"path": "prepared", "weight": 1.0}]}),
    ("megasdc.data.tokenizer", {}),
    ("megasdc.data.sources", {"megasdc.data.sources": [{}]}),
    ("megasdc.training.eval", {"megasdc.training.eval_interval": 1, "megasdc.training.eval_samples": 2}),
    ("megasdc.training.garbage", {"megasdc.training.garbage_collection": "managed"}),
    ("megasdc.determinism", _DETERMINISTIC),
    ("megasdc.checkpoint", {"megasdc.checkpoint.interval": 1}),
    ("megasdc.checkpoint.archive", {"megasdc.checkpoint.archive.address": "archive"}),
    ("checkpoint", {"megasdc.checkpoint.interval": 1}),
    ("megasdc.trace", {"megasdc.trace.enabled": True}),
    ("megasdc.sdc", {**_DETERMINISTIC, "megasdc.sdc.always_on.enabled": True}),
    ("megasdc.audit", {**_DETERMINISTIC, "megasdc.audit.enabled": True, "megasdc.audit.interval": 1}),
    (
        "megasdc.study",
        {"megasdc.study": {"mode": "computation_sync", "replicas": 2}, **_DETERMINISTIC},
    ),
    ("megasdc.drop_compute", {"megasdc.drop_compute": {"enabled": True, "threshold": 5.0}}),
    (
        "megasdc.optimizer_hooks",
        {
            "megasdc.optimizer_hooks": [
                {"hook": "absolute", "theta": 1.0, "parameters": ["*.linear_fc1.weight"]},
                {"hook": "spike_aware", "theta": 100.0, "grace_steps": 0},
                {"hook": "momentum_reset", "interval": 5, "warmup_steps": 2},
            ]
        },
    ),
    (
        "megasdc.faults",
        {
            "megasdc.faults": [
                {"kind": "value", "value": 1.0, "rank": 0, "burst": {"length": 1, "probability": 0.5}},
                {"kind": "scale", "factor": 1.5, "phase": "reduced_grad", "steps": [1, None]},
                {"kind": "noise", "deviation": 0.1, "phase": "backward", "micro_batches": [0]},
                {"phase": "tokens", "slot": "tokens", "bits": [0]},
                {"bits": "mantissa", "phase": "weight_grad", "pattern": "periodic", "period": 4, "run": 2},
                {"bits": [0], "pattern": "indices", "indices": [0, 3], "only_above": 0.0, "only_below": 10.0},
            ]
        },
    ),
    (
        "megasdc.process_faults",
        {
            "megasdc.process_faults": [
                {"kind": "exit", "exit_code": 9, "steps": [3, 3]},
                {"kind": "slow", "factor": 1.01},
            ]
        },
    ),
    (
        "megasdc.delay",
        {
            "megasdc.delay": [
                {"kind": "normal", "mean_s": 0.001, "std_s": 0.001},
                {"kind": "bursts", "probability": 0.5, "num_steps": 1, "delay_s": 0.001},
                {"kind": "slow_periods", "period_steps": 2, "slow_steps": 1, "delay_s": 0.001},
            ]
        },
    ),
]
"""What a field needs around it to be read at all: by how its path begins, the longest that fits."""

OPEN_KEYS: dict[Path_, tuple[str, ...]] = {
    ("megasdc", "model", "megatron"): (
        "activation_func_clamp_value",
        "deterministic_mode",
        "glu_linear_offset",
        "no_rope_freq",
        "qk_layernorm",
        "softmax_scale",
        "num_layers",
    ),
}
"""Keys of objects that have no class of their own."""

LONG = "x" * 300
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 64, 100_000, 2**31, 2**53, 2**53 + 1, 2**63, 10**30, -(10**30), 10**399,
    -0.5, 0.0, 1e-300, 1e-4, 0.5, 1.0, 1.5, 9.3e9, 1e30, 1e308, float("inf"), float("-inf"), float("nan"),
    "", " ", "x", "*", "[", "nan", "inf", "\0", "a\0b", "\ud800", "\u00e9", LONG, "x" * 5000, "../x", "/proc/x/y",
    "/dev/null", "/dev/full/x", [], [None], [0], [1], [-1], [1, 1], [2, 1, 0], [1, None], ["x"], [""], ["\0"], [[]],
    [[1, 2.0]], [10**30], {}, {"x": 1}, {"": None}, {"\0": 1}, {"\ud800": 1},
)  # fmt: skip


def fields() -> Iterator[tuple[Path_, Any]]:
    """Yield the path and type of every field, in lists once for each item of its context."""
    yield from _fields(WholeFile, ())


def _fields(model: type[BaseModel], at: Path_) -> Iterator[tuple[Path_, Any]]:
    for name, info in model.model_fields.items():
        path = (*at, name)
        yield path, Annotated[info.annotation, *info.metadata, None]
        for key in OPEN_KEYS.get(path, ()):
            yield (*path, key), Any
        if (inner := model_in(info.annotation)) is not None:
            yield from _fields(inner, path)
        elif (inner := model_in(element_in(info.annotation))) is not None:
            for index in range(len(value_at(context_of(path), path) or [])):
                yield (*path, index), inner
                yield from _fields(inner, (*path, index))


def context_of(path: Path_) -> dict[str, Any]:
    """The tiny run with what this field needs around it."""
    raw = copy.deepcopy(BASE)
    name = ".".join(map(str, path))
    fitting = [(prefix, changes) for prefix, changes in CONTEXTS if name.startswith(prefix)]
    for key, value in max(fitting, default=("", {}))[1].items():
        put(raw, tuple(key.split(".")), copy.deepcopy(value))
    return raw


def values_of(annotation: Any) -> Iterator[Any]:
    """Values to put into a field of this type: its own, and what people and programs put there by mistake."""
    yield from _own(annotation)
    yield from VALUES


def _own(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Literal:
        yield from get_args(annotation)
        yield f"{get_args(annotation)[0]}x"
    elif origin is Annotated:
        yield from _own(get_args(annotation)[0])
        bounds = (getattr(item, name, None) for item in get_args(annotation)[1:] for name in ("gt", "ge", "lt", "le"))
        yield from (bound for bound in bounds if bound is not None)
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _own(part)
    elif origin is list:
        yield from ([value] for value in _own(get_args(annotation)[0]))


def misspelt(name: str) -> Iterator[str]:
    """Names that are near a valid one, and ones that are near none."""
    yield from (f"{name}x", name[:-1] or "x", name.upper(), name[::-1], f" {name}", f"{name}\0", "\ud800", "", LONG)


def put(raw: dict[str, Any], path: Path_, value: Any) -> None:
    """Put a value into a file, in place; objects on the way are made."""
    at: Any = raw
    for key in path[:-1]:
        at = at.setdefault(key, {}) if isinstance(at, dict) else at[key]
    at[path[-1]] = value


def value_at(raw: Any, path: Path_) -> Any:
    """The value in a file, None where there is none."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else raw[key] if isinstance(raw, list) else None
    return raw
