"""Requirements of a guard on a DeepSpeed engine, and the place of its ranks in the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megasdc.attached.protect import Conditions, Obstacle
from megasdc.attached.rows import products_of
from megasdc.attached.slices import check_slices, slice_obstacles
from megasdc.common.errors import ConfigError
from megasdc.config.environment import VARIABLES, Variable
from megasdc.config.guard import GuardSettings
from megasdc.parallel.dims import ParallelDims

UNGUARDED = (
    "A model of plain PyTorch, also in DistributedDataParallel or FSDP, cannot be guarded yet: a guard acts before "
    "DeepSpeed's optimizer step. What can: the same model in deepspeed.initialize with ZeRO 0, whose replicas are "
    "those of DistributedDataParallel, 1 or 2; Trainer with TrainingArguments(deepspeed=...). Without a guard "
    "`megasdc run` names ranks that are stuck or fail, and `megasdc stress` tests hosts: docs/guides/attach.md."
)

TENSOR_SIZES = (
    "get_slice_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_model_parallel_world_size",
)
"""Names of methods that return the tensor size: of DeepSpeed's pipelines, and of Megatron's mpu, newer and older."""
ZERO3 = "zero_optimization.stage: got 3; allowed: 0 to 2, whose ranks hold whole parameters that can be compared."
COMPILED = (
    "engine: its model is compiled, so that its submodules cannot be observed; attach before torch.compile, and train "
    "without it."
)


def check_engine(engine: Any) -> None:
    """Refuse an engine that cannot be guarded.

    Raises:
        ConfigError: the engine cannot be guarded; with every reason.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not isinstance(engine, DeepSpeedEngine):
        what = f"{type(engine).__module__}.{type(engine).__qualname__}"
        needed = f"engine: got {what}; needed: what deepspeed.initialize returns first, a DeepSpeedEngine."
        raise ConfigError(f"{needed} {UNGUARDED}" if isinstance(engine, nn.Module) else needed)
    problems = []
    if engine.zero_optimization_stage() > 2:
        problems.append(ZERO3)
    if engine.optimizer is None:
        problems.append("engine: it has no optimizer; a guard acts before optimizer steps.")
    if any(map(_is_compiled, (engine, *engine.module.modules()))):
        problems.append(COMPILED)
    if engine.has_moe_layers:
        problems.append("engine: its model has experts on different ranks, whose parameters are no copies.")
    if getattr(engine, "sequence_parallel_size", 1) > 1:
        problems.append("engine: its ranks share sequences, so that none computes a batch alone.")
    if problems:
        raise ConfigError(problems)


def check_conditions(engine: Any, settings: GuardSettings, environ: Mapping[str, str]) -> None:
    """Refuse checks, those of the word's among them, that an engine or the environment forbids.

    Raises:
        ConfigError: with every problem of the one or the other.
    """
    check_slices(settings.sdc.always_on, engine)
    check_environment_for(settings, engine.device.type, environ)


def check_environment_for(settings: GuardSettings, device: str, environ: Mapping[str, str]) -> None:
    """Refuse an environment in which a GPU does not repeat what the settings need repeated; see the next function."""
    if settings.audit.enabled or settings.sdc.golden is not None or settings.determinism.enabled:
        check_environment(device, settings.determinism.enabled, environ)


def check_environment(device: str, whole: bool, environ: Mapping[str, str]) -> None:
    """Refuse an environment in which a GPU does not repeat bit for bit.

    Args:
        device: type of the engine's device.
        whole: whether all of training is deterministic, with its collectives; else audits alone, which have none.

    Raises:
        ConfigError: some variables are wrong; with every one of them.
    """
    problems = [
        f"environment: {one.name}: got {environ.get(one.name)!r}; allowed: {', '.join(one.accepted)}: {one.reason}. "
        "Set it before the ranks start, for other hosts in the file .deepspeed_env."
        for one in _wrong_variables(device, whole, environ)
    ]
    if problems:
        raise ConfigError(problems)


def conditions_of(engine: Any, replicas: int, environ: Mapping[str, str]) -> Conditions:
    """What this rank knows of what decides which checks a guard can make.

    Args:
        replicas: number of replicas.
    """
    return Conditions(
        replicas=replicas,
        micro_batches=int(engine.gradient_accumulation_steps()),
        audits=audit_obstacle(engine.device.type, environ),
        slices=Obstacle.of(slice_obstacles(engine)),
        rows=None if products_of(engine.module) else Obstacle("the model has no torch.nn.Linear", "such a layer"),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def audit_obstacle(device: str, environ: Mapping[str, str]) -> Obstacle | None:
    """What forbids audits on this rank; None: nothing.

    Args:
        device: type of the engine's device.
    """
    wrong = _wrong_variables(device, False, environ)
    if not wrong:
        return None
    why = " and ".join(f"{one.name} is {environ.get(one.name)!r}" for one in wrong)
    needed = ", ".join(f"{one.name}={one.accepted[0]}" for one in wrong)
    return Obstacle(why, f"{needed} in the environment before the ranks start")


def _wrong_variables(device: str, whole: bool, environ: Mapping[str, str]) -> list[Variable]:
    needed = VARIABLES if whole else [one for one in VARIABLES if one.name.startswith("CUBLAS")]
    return [one for one in needed if device == "cuda" and not one.is_fixed(environ)]


def dims_of(engine: Any) -> ParallelDims:
    """Layout of an engine's ranks, with this rank's place.

    Raises:
        ConfigError: ranks are not numbered with tensor fastest, then data, then pipeline.
    """
    grid = engine.mpu  # of a pipeline its grid, of which stages count as ranks of a model, too
    tensor = pipeline = 1
    if grid is not None:
        tensor = next(getattr(grid, name)() for name in TENSOR_SIZES if hasattr(grid, name))
        pipeline = getattr(engine, "num_stages", 1)
    dims = ParallelDims.from_world(tensor, pipeline, dist.get_world_size(), dist.get_rank())
    place = dims.dp_rank if grid is None else grid.get_data_parallel_rank()
    if place != dims.dp_rank:
        raise ConfigError(
            f"engine: rank {dims.rank} is replica {place}; needed for {dims}: {dims.dp_rank}, ranks numbered with "
            "tensor fastest, then data, then pipeline."
        )
    return dims


def engine_precision(engine: Any) -> str:
    """Precision of an engine: ``fp32``, ``bf16`` or ``fp16``."""
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"


def refuse_compiling(engine: Any) -> Callable[[], None]:
    """Have ``engine.compile`` raise ConfigError from now on, as attaching to a compiled engine does.

    Returns:
        A function that undoes it.
    """

    def refuse(*_args: Any, **_options: Any) -> None:
        raise ConfigError(COMPILED)

    vars(engine)["compile"] = refuse
    return partial(vars(engine).pop, "compile", None)


def check_still_plain(engine: Any) -> None:
    """Refuse an engine whose model was compiled since a guard was attached.

    Raises:
        ConfigError: it was, the whole model at once.
    """
    if _is_compiled(engine) or _is_compiled(engine.module):
        raise ConfigError(COMPILED)


def _is_compiled(module: Any) -> bool:
    """Whether ``torch.compile``, ``Module.compile`` or an engine's own ``compile`` was used on a module."""
    return (
        module._compiled_call_impl is not None
        or type(module).__name__ == "OptimizedModule"
        or getattr(module, "is_compiled", False) is True
    )
