"""DeepSpeed's part of a configuration: its keys as sections, those refused, defaults, and checks.

DeepSpeed 0.19.8 checks only some of its sections and stops at the first problem, with an assertion. It silently ignores
unknown top-level keys. So every key that is allowed with ZeRO-1 pipeline training is declared here, as a field of a
class, and every other one that it reads is refused by name: all problems are found before a rank starts. Tests compare
both with the installed DeepSpeed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from megasdc.common.imports import is_installed
from megasdc.config.fields import (
    APPLIED,
    FLAG,
    LARGEST_INTEGER,
    UNIVERSAL,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    section,
    setting,
)

Ratio = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
DataType = Literal["fp32", "fp16", "bf16"]
_OF_GROUPS = Field(min_length=2, max_length=2)
"""One value for each of the optimizer's parameter groups, `megasdc.optim.zero1`."""


class OptimizerParams(Section):
    """Arguments of Adam and AdamW."""

    at_resume = "applied"

    lr: PositiveFloat = setting(3e-4, "Largest learning rate.")
    betas: list[Beta] = setting([0.9, 0.95], "Decay of the two moments.", min_length=2, max_length=2)
    eps: PositiveFloat = setting(1e-8, "Added to the root of the second moment.")
    weight_decay: NonNegativeFloat = setting(0.1, "Decoupled decay; not applied to norms and biases.")
    torch_adam: bool = setting(True, "PyTorch's optimizer; false: DeepSpeed's compiled one.", UNIVERSAL)
    adam_w_mode: bool = setting(True, "Adam only: decouple the weight decay as AdamW does.", UNIVERSAL)
    fused: bool = setting(True, "torch_adam only: one kernel for all parameters.")
    foreach: bool | None = setting(None, "torch_adam only: multi-tensor kernels; excludes fused.")
    bias_correction: bool = setting(True, "DeepSpeed's compiled Adam only: correct the moments' bias.")


class Optimizer(Section):
    """DeepSpeed's `optimizer`."""

    at_resume = "universal"

    type: Literal["Adam", "AdamW"] = setting("AdamW", "Optimizer.")
    params: OptimizerParams = section(OptimizerParams)
    legacy_fusion: bool = setting(False, "As DeepSpeed documents it.", APPLIED)


class SchedulerParams(Section):
    """Arguments of all schedules together; which schedule takes which is in `SCHEDULER_PARAMS`."""

    at_resume = "applied"

    total_num_steps: PositiveInt = setting(1, "Steps of the schedule; absent: training.steps.")
    warmup_num_steps: PositiveInt = setting(1, "Steps of warm-up; absent: min(2000, 10 % of the steps).")
    warmup_type: Literal["linear", "log"] = setting("linear", "Shape of the warm-up.")
    warmup_min_lr: NonNegativeFloat | Annotated[list[NonNegativeFloat], _OF_GROUPS] = setting(
        0.0, "First learning rate; two: of parameters with weight decay and of those without."
    )
    warmup_max_lr: PositiveFloat | Annotated[list[PositiveFloat], _OF_GROUPS] = setting(
        3e-4, "Learning rate after warm-up, or two; absent: optimizer.params.lr."
    )
    warmup_min_ratio: Ratio = setting(0.0, "First learning rate over the largest.")
    cos_min_ratio: Ratio = setting(0.1, "Last learning rate over the largest.")


class Scheduler(Section):
    """DeepSpeed's `scheduler`."""

    at_resume = "applied"

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"] = setting("WarmupCosineLR", "Schedule.")
    params: SchedulerParams = section(SchedulerParams)


class OffloadOptimizer(Section):
    """DeepSpeed's `zero_optimization.offload_optimizer`."""

    at_resume = "applied"

    device: Literal["none", "cpu"] = setting(
        "none", "Where the optimizer's state is stored; NVMe is for ZeRO stage 3, stage 1 would use the CPU."
    )
    pin_memory: bool = True


class Zero(Section):
    """DeepSpeed's `zero_optimization`, as far as stage 1 reads it."""

    at_resume = "applied"

    stage: Literal[1] = setting(
        1, "ZeRO stage; the pipeline engine cannot reduce gradients in stages 2 and 3, and 0 shards nothing"
    )
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: PositiveInt = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: NonNegativeInt = 500_000_000
    overlap_comm: bool | None = None
    load_from_fp32_weights: Literal[True] = setting(
        True,
        "master weights are loaded as they were saved; DeepSpeed rounds them otherwise, or leaves them as initialized",
    )
    elastic_checkpoint: Literal[False] = setting(
        False, "megasdc's own checkpoints load under another number of replicas; DeepSpeed's way fails there"
    )
    offload_optimizer: OffloadOptimizer | None = None
    ignore_unused_parameters: bool = True
    round_robin_gradients: bool = setting(False, at_resume=UNIVERSAL)
    parameter_alignment: bool = setting(False, at_resume=UNIVERSAL)


class Bf16(Section):
    """DeepSpeed's `bf16`."""

    at_resume = "universal"

    enabled: bool = setting(False, "Train in bfloat16.")
    immediate_grad_update: bool = setting(False, at_resume=APPLIED)
    check_grad_overflow: bool = setting(True, at_resume=APPLIED)
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class Fp16(Section):
    """DeepSpeed's `fp16`."""

    at_resume = "applied"

    enabled: bool = setting(False, "Train in float16 with loss scaling.", UNIVERSAL)
    auto_cast: bool = False
    loss_scale: NonNegativeFloat = setting(0.0, "Fixed loss scale; 0: dynamic.")
    initial_scale_power: Annotated[int, Field(ge=0, le=127)] = setting(16, at_resume=FLAG)
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: PositiveInt = 1
    fp16_master_weights_and_grads: bool = setting(False, at_resume=UNIVERSAL)


class DataTypes(Section):
    """DeepSpeed's `data_types`."""

    at_resume = "universal"

    grad_accum_dtype: DataType | None = setting(None, "Type of the sum of gradients; absent: fp32, with fp16 that.")


class Pipeline(Section):
    """DeepSpeed's `pipeline`."""

    at_resume = "applied"

    activation_checkpoint_interval: NonNegativeInt = setting(
        0, "Layers between saved activations; 0: nothing is recomputed."
    )
    use_reentrant: bool = True
    pipe_partitioned: bool = True
    grad_partitioned: bool = True


class ActivationCheckpointing(Section):
    """DeepSpeed's `activation_checkpointing`."""

    at_resume = "applied"

    partition_activations: bool = False
    number_checkpoints: PositiveInt | None = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    profile: bool = False
    synchronize_checkpoint_boundary: bool = False


class ParallelWrite(Section):
    """DeepSpeed's `checkpoint.parallel_write`."""

    at_resume = "-"

    pipeline_stage: bool = False


class Checkpoint(Section):
    """DeepSpeed's `checkpoint`."""

    at_resume = "-"

    tag_validation: Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL", "ignore", "warn", "fail"] = "Warn"
    parallel_write: ParallelWrite = section(ParallelWrite)
    load_universal: Literal[False] = setting(
        False, "checkpoints are loaded and verified by megasdc, which reads no universal ones this way"
    )
    use_node_local_storage: bool = setting(False, "Follows megasdc.checkpoint.storage; absent: set from there.")
    checkpoint_serialization: Literal[True] = setting(
        True, "false is the format of PyTorch 1.5, which megasdc does not verify"
    )


class TensorBoard(Section):
    """DeepSpeed's `tensorboard` and `csv_monitor`."""

    at_resume = "-"

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Wandb(Section):
    """DeepSpeed's `wandb`."""

    at_resume = "-"

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class Comet(Section):
    """DeepSpeed's `comet`."""

    at_resume = "-"

    enabled: bool = False
    samples_log_interval: PositiveInt = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = setting(None, "Refused, as all secrets are: set COMET_API_KEY in the environment.")
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: Literal["get", "create", "get_or_create"] | None = None


class Aio(Section):
    """DeepSpeed's `aio`, which it reads and, in ZeRO-1, does not use."""

    at_resume = "-"

    block_size: PositiveInt = 1048576
    queue_depth: PositiveInt = 8
    intra_op_parallelism: PositiveInt = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: Literal[False] = setting(False, "GPUDirect Storage is for the offloads of ZeRO stage 3.")


class CommsLogger(Section):
    """DeepSpeed's `comms_logger`."""

    at_resume = "-"

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = Field(default_factory=list)
    verbose: bool = False
    debug: bool = False


class ThroughputTimer(Section):
    """DeepSpeed's `timers.throughput`."""

    at_resume = "-"

    enabled: bool = True
    synchronized: bool = True


class Timers(Section):
    """DeepSpeed's `timers`."""

    throughput: ThroughputTimer = section(ThroughputTimer)


class DeepSpeedPart(Section):
    """Every top-level DeepSpeed key that ZeRO-1 pipeline training supports; all are optional."""

    at_resume = "-"

    train_batch_size: PositiveInt = setting(
        1, "Samples of one step over all ranks; absent: as many as the other two sizes and the ranks make.", FLAG
    )
    train_micro_batch_size_per_gpu: PositiveInt = setting(1, "Samples of one micro-batch on one replica.", APPLIED)
    gradient_accumulation_steps: PositiveInt = setting(
        1,
        "Micro-batches of one step on one replica; where the step's cannot be divided among the replicas, the most.",
        APPLIED,
    )
    gradient_clipping: NonNegativeFloat = setting(1.0, "Largest gradient norm; 0: no clipping.", APPLIED)
    optimizer: Optimizer = section(Optimizer)
    scheduler: Scheduler = section(Scheduler)
    zero_optimization: Zero = section(Zero)
    bf16: Bf16 = section(Bf16)
    bfloat16: Bf16 = section(Bf16)
    fp16: Fp16 = section(Fp16)
    data_types: DataTypes = section(DataTypes)
    pipeline: Pipeline = section(Pipeline)
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing)
    checkpoint: Checkpoint = section(Checkpoint)
    tensorboard: TensorBoard = section(TensorBoard)
    csv_monitor: TensorBoard = section(TensorBoard)
    wandb: Wandb = section(Wandb)
    comet: Comet = section(Comet)
    comms_logger: CommsLogger = section(CommsLogger)
    timers: Timers = section(Timers)
    aio: Aio = section(Aio)
    communication_data_type: DataType | None = setting(None, at_resume=APPLIED)
    seq_parallel_communication_data_type: DataType | None = setting(None, at_resume=APPLIED)
    disable_allgather: bool = setting(False, at_resume=APPLIED)
    dump_state: bool = False
    gradient_predivide_factor: PositiveFloat = setting(1.0, at_resume=APPLIED)
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    memory_breakdown: bool = False
    prescale_gradients: bool = setting(False, at_resume=APPLIED)
    steps_per_print: PositiveInt | None = setting(None, "Steps between progress lines of DeepSpeed's; absent: none.")
    vocabulary_size: PositiveInt | None = None
    wall_clock_breakdown: bool = False
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = setting(True, at_resume=APPLIED)


UNSUPPORTED_KEYS: dict[str, str] = {
    "amp": "use bf16 or fp16",
    "autotuning": "run it apart from megasdc",
    "compile": "modules run as they are written",
    "compression_training": "megasdc trains the full model",
    "curriculum_learning": "samples have one fixed length",
    "data_efficiency": "samples come from megasdc's own loader",
    "dataloader_drop_last": "samples come from megasdc's own loader",
    "datastates_ckpt": "checkpoints are written and verified by megasdc",
    "disable_python_gc": "megasdc's own loop does not read it",
    "eigenvalue": "DeepSpeed has removed it",
    "elasticity": "the layout is fixed for one run; change it between runs",
    "expert_parallel": "megasdc trains dense models",
    "flops_profiler": "megasdc reports FLOP/s itself",
    "gradient_allreduce_op": "gradients are averaged over data-parallel ranks",
    "graph_harvesting": "DeepSpeed has removed it",
    "hybrid_engine": "megasdc trains only",
    "managed_gradient_accumulation": "the pipeline schedule accumulates",
    "nebula": "checkpoints are written and verified by megasdc",
    "progressive_layer_drop": "the pipeline runs every layer",
    "quantize_training": "megasdc trains the full model",
    "sparse_attention": "attention is dense and causal",
    "sparse_gradients": "embedding gradients are dense",
    "tensor_parallel": "set megasdc.parallel.tensor",
    "torch_autocast": "use bf16 or fp16",
    "use_data_before_expert_parallelism": "megasdc trains dense models",
    "weight_quantization": "megasdc trains the full model",
}
"""Top-level keys that DeepSpeed 0.19 reads, or rejects by name because it has removed the feature, and that megasdc
refuses, with the remedy."""

SCHEDULER_PARAMS: dict[str, frozenset[str]] = {
    "WarmupLR": frozenset({"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}),
    "WarmupDecayLR": frozenset(
        {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"}
    ),
    "WarmupCosineLR": frozenset(
        {"warmup_min_ratio", "warmup_num_steps", "warmup_type", "total_num_steps", "cos_min_ratio"}
    ),
}
"""Parameters of DeepSpeed's LR schedules: warm-up, then constant, linear to 0, or cosine."""

_STAGE3 = "only ZeRO stage 3 reads it, and the pipeline engine trains with stage 1"
_STAGE3_KEYS = (
    "offload_param",
    "sub_group_size",
    "cpu_offload_param",
    "prefetch_bucket_size",
    "stage3_prefetch_bucket_size",
    "param_persistence_threshold",
    "stage3_param_persistence_threshold",
    "model_persistence_threshold",
    "stage3_model_persistence_threshold",
    "max_live_parameters",
    "stage3_max_live_parameters",
    "max_reuse_distance",
    "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "stage3_allgather_sequential",
    "stage3_gather_fp16_weights_on_model_save",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
)

_STAGE3_OFFLOAD_KEYS = (
    "nvme_path",
    "buffer_count",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
    "ratio",
    "super_offload",
    "cpuadam_cores_perc",
)

REFUSED_KEYS: dict[str, str] = {
    **UNSUPPORTED_KEYS,
    "pipeline.stages": "set megasdc.parallel.pipeline",
    "pipeline.partition": "set megasdc.parallel.partition",
    "pipeline.seed_layers": "set megasdc.training.seed; layers are always seeded by their index",
    "optimizer.params.max_grad_norm": "set gradient_clipping",
    "data_types.param_dtype": "use bf16 or fp16",
    "data_types.buffer_dtype": "use bf16 or fp16",
    "data_types.keep_in_fp32_modules": "megasdc chooses what stays in fp32",
    "checkpoint.writer": "checkpoints are written and verified by megasdc",
    **{f"zero_optimization.{key}": _STAGE3 for key in _STAGE3_KEYS},
    **{f"zero_optimization.offload_optimizer.{key}": _STAGE3 for key in _STAGE3_OFFLOAD_KEYS},
    "zero_optimization.compute_grad_norm": "the gradient norm is always computed and reported",
    "zero_optimization.legacy_stage1": "DeepSpeed no longer reads it",
    "zero_optimization.zenflow": "it needs ZeRO stage 2 or 3",
    "zero_optimization.cpu_offload": "set offload_optimizer",
    "zero_optimization.cpu_offload_use_pin_memory": "set offload_optimizer",
    "zero_optimization.pipeline_loading_checkpoint": "it needs ZeRO stage 3",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer is Adam or AdamW",
}
"""Dotted DeepSpeed keys that exist but are refused, with the remedy or reason."""


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


def recompute_interval_of(deepspeed: Mapping[str, Any]) -> int:
    """Number of layers between two that keep their input to recompute from, by DeepSpeed's keys; 0: none recomputes."""
    return int(deepspeed.get("pipeline", {}).get("activation_checkpoint_interval", 0))


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


MONITORS = {"tensorboard": "tensorboard", "csv_monitor": None, "wandb": "wandb", "comet": "comet_ml"}
"""The package that each of DeepSpeed's monitors imports; None: none beyond Python's own."""


def _monitor_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    for key, package in MONITORS.items():
        if package is not None and deepspeed.get(key, {}).get("enabled") and not is_installed(package):
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
