"""Sections of DeepSpeed's keys, one class each.

DeepSpeed 0.19.8 checks only some of its sections and stops at the first problem, with an assertion. The classes below
declare every key that is allowed with ZeRO-1 pipeline training, so that all problems are found before a rank starts. A
test compares them with DeepSpeed's own classes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megasdc.config.fields import (
    APPLIED,
    FLAG,
    UNIVERSAL,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
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
    load_from_fp32_weights: bool = True
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
