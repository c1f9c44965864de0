"""Typed sections of the ``megasdc`` key, one class each.

The description of every field states its meaning, unit, range and what null means; the documentation's table is
generated from it. A section is read only by the part of the package that it configures.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megasdc.addresses import PHASES
from megasdc.config.fields import (
    APPLIED,
    NO_MATTER,
    UNIVERSAL,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    section,
)
from megasdc.config.sections.data import DataSection
from megasdc.config.sections.delay import DelaySpec
from megasdc.config.sections.detection import AuditSection, SdcSection
from megasdc.config.sections.drop_compute import DropComputeSection
from megasdc.config.sections.faults import FaultSpec, ProcessFaultSpec
from megasdc.config.sections.model import ModelSection
from megasdc.config.sections.optimizer_hooks import HookSpec
from megasdc.config.sections.study import StudySection


class ParallelSection(Section):
    """How the ranks divide the model; data parallel is what remains: world size / (tensor x pipeline)."""

    tensor: PositiveInt = Field(1, description="Tensor-parallel ranks (TP).", json_schema_extra=UNIVERSAL)
    pipeline: PositiveInt = Field(1, description="Pipeline stages (PP).", json_schema_extra=UNIVERSAL)
    sequence_parallel: bool = Field(
        False,
        description="Split norms and dropout along the sequence over the tensor ranks; needs tensor > 1.",
        json_schema_extra=APPLIED,
    )
    partition: Literal["uniform", "parameters"] | list[PositiveInt] = Field(
        "uniform",
        description="Transformer layers of each stage: equal counts, equal numbers of parameters, or given counts.",
        json_schema_extra=UNIVERSAL,
    )
    timeout_s: Annotated[float, Field(ge=1, le=1e9)] = Field(
        1800.0,
        description="Seconds after which a collective times out, set on every process group; also those within which "
        "all ranks must have connected at the start.",
        json_schema_extra=NO_MATTER,
    )
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        1,
        description="CPU threads of a rank on machines without an accelerator; 0: PyTorch's own choice.",
        json_schema_extra=APPLIED,
    )
    share_devices: bool = Field(
        False,
        description="Let the ranks of a host share its GPUs, assigned round robin; collectives use gloo through host "
        "memory, since NCCL refuses two ranks on one GPU; slow, to try a layout where GPUs are few.",
        json_schema_extra=APPLIED,
    )


class TrainingSection(Section):
    """How long to train, and when to evaluate and stop."""

    steps: PositiveInt = Field(
        ..., description="Optimizer steps of the whole run, resumed parts included.", json_schema_extra=APPLIED
    )
    seed: NonNegativeInt = Field(1234, description="Seed of initial weights and dropout.", json_schema_extra=UNIVERSAL)
    eval_interval: NonNegativeInt = Field(
        0, description="Steps between evaluations; 0: none.", json_schema_extra=APPLIED
    )
    eval_samples: PositiveInt = Field(
        64,
        description="Validation samples of one evaluation, the same each time; rounded up to whole micro-batches.",
        json_schema_extra=APPLIED,
    )
    time_limit_s: PositiveFloat | None = Field(
        None,
        description="Save and stop at the first step boundary after so many seconds; null: no limit.",
        json_schema_extra=NO_MATTER,
    )
    stop_step: PositiveInt | None = Field(
        None,
        description="Save and stop after this step although the run is longer; null: continue to `steps`.",
        json_schema_extra=NO_MATTER,
    )
    max_skipped_steps: PositiveInt = Field(
        100,
        description="Stop with the non-finite exit code after so many skipped steps in a row.",
        json_schema_extra=APPLIED,
    )
    garbage_collection: Literal["python", "managed"] = Field(
        "python",
        description="python: Python collects garbage whenever it does by itself, each rank at another moment; managed: "
        "all ranks at the end of the same steps, ignoring objects created before the first collection.",
        json_schema_extra=NO_MATTER,
    )
    garbage_collection_interval: PositiveInt = Field(
        50,
        description="managed: steps between collections; memory that only garbage in cycles holds stays taken so long.",
        json_schema_extra=NO_MATTER,
    )


class DeterminismSection(Section):
    """Whether two runs on machines of one kind must agree in every bit."""

    at_resume = "applied"

    enabled: bool = Field(
        False,
        description="Choose only what repeats bit for bit in PyTorch, cuBLAS, cuDNN, NCCL, Megatron-core and "
        "Transformer Engine; an operation that cannot raises. false: nothing is set.",
    )
    fill_uninitialized_memory: bool = Field(
        False,
        description="Fill every new tensor with NaN before it is written, to find reads of uninitialised memory; "
        "slow, and not needed to repeat a run. Needs `enabled`.",
    )


class CheckpointSection(Section):
    """When and where to save, what to keep, what to resume from."""

    at_resume = "-"

    folder: str | None = Field(None, description="Folder of checkpoints; null: `checkpoints` in the run folder.")
    interval: NonNegativeInt = Field(0, description="Steps between checkpoints; 0: only at the end.")
    keep_last: NonNegativeInt = Field(2, description="Newest checkpoints kept; 0: all.")
    keep_every: NonNegativeInt = Field(0, description="Checkpoints whose step is a multiple are kept too; 0: none.")
    storage: Literal["shared", "node_local"] = Field(
        "shared",
        description="Whether all nodes see one checkpoint folder or each node has its own.",
        json_schema_extra=UNIVERSAL,
    )
    resume: Literal["auto", "never", "must"] = Field(
        "auto",
        description="auto: from the newest complete checkpoint if there is one; must: fail if there is none; "
        "never: refuse a folder that holds one.",
    )
    verify: bool = Field(True, description="Check sizes and checksums of every file before resuming.")
    require_verified: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Resume only from a checkpoint after which an audit agreed; auto: where the run before has ended "
        "because of corruption. Newer ones are moved to `unverified`.",
    )
    universal: str | None = Field(
        None,
        min_length=1,
        description="Folder of a universal checkpoint to start from, at any layout; used only when the run's "
        "checkpoint folder holds no checkpoint; null: none.",
    )
    universal_without: list[Literal["loader", "hooks"]] = Field(
        [],
        description="What `universal` may lack: loader: the data start again at their first sample; "
        "hooks: hooks begin without their saved states.",
    )


class LoggingSection(Section):
    """Where a run writes, and how often it reports."""

    at_resume = "-"

    run_dir: str = Field(..., description="Folder of this run; created if absent.")
    interval: PositiveInt = Field(10, description="Steps between reported lines and metrics.")
    progress_bar: bool = Field(True, description="A progress bar with ETA where rank 0 writes to a terminal.")
    peak_tflops: PositiveFloat | None = Field(
        None, description="Peak TFLOP/s of one device for MFU; null: from a table of known GPUs, else not reported."
    )


class TraceSection(Section):
    """Exact checksums of what every submodule computes, written to the run folder."""

    at_resume = "applied"

    enabled: bool = Field(False, description="Record a trace; off: no hook is attached anywhere.")
    granularity: Literal["layer", "submodule", "gemm"] = Field(
        "gemm",
        description="layer: results of whole layers, embedding, output and loss; submodule: also norms, attention, MLP "
        "and residual sums; gemm: also every linear layer.",
    )
    phases: list[Literal[PHASES]] = Field(  # type: ignore[valid-type]
        list(PHASES), min_length=1, description="Phases that are recorded."
    )
    interval: PositiveInt = Field(1, description="Steps between recorded steps; the first is always recorded.")
    micro_batches: list[NonNegativeInt] | None = Field(
        None, description="Micro-batches of a step that are recorded, the first is 0; null: all."
    )
    layers: list[NonNegativeInt] | None = Field(
        None,
        description="Places of layers in the pipeline that are recorded: 0 word embedding, 1 positions, 2 the first "
        "transformer layer; null: all.",
    )
    algorithm: Literal["xxh3_64.v1", "mixed_sum_64.v1"] | None = Field(
        None, description="Checksum algorithm; null: the fastest for the device, the first on a CPU."
    )


class GoldenSection(Section):
    """The workload of golden traces: seeded weights and tokens, no corpus; `trace` says what is recorded of it."""

    at_resume = "applied"

    steps: PositiveInt = Field(2, description="Optimizer steps of one run.")
    micro_batches: PositiveInt = Field(2, description="Micro-batches of a step on each replica.")
    micro_batch_size: PositiveInt = Field(1, description="Samples of a micro-batch; more fill the device.")
    sequence_lengths: Annotated[list[PositiveInt], Field(min_length=1)] | None = Field(
        None, description="Tokens of a sample, one case each; null: `data.sequence_length` alone."
    )
    seeds: PositiveInt = Field(1, description="Different tokens for each length; a case each.")
    vocab_size: PositiveInt = Field(8192, description="Entries of the vocabulary, instead of a tokenizer's.")


class MegasdcSection(Section):
    """All sections of the `megasdc` key."""

    model: ModelSection = section(ModelSection)
    data: DataSection
    parallel: ParallelSection = section(ParallelSection)
    training: TrainingSection
    determinism: DeterminismSection = section(DeterminismSection)
    checkpoint: CheckpointSection = section(CheckpointSection)
    trace: TraceSection = section(TraceSection)
    golden: GoldenSection = section(GoldenSection)
    sdc: SdcSection = section(SdcSection)
    audit: AuditSection = section(AuditSection)
    study: StudySection = section(StudySection)
    drop_compute: DropComputeSection = section(DropComputeSection)
    optimizer_hooks: list[HookSpec] = Field(
        [],
        description="What bounds gradients and resets moments, in this order; empty: nothing.",
        json_schema_extra=APPLIED,
    )
    faults: list[FaultSpec] = Field(
        [], description="Faults injected on purpose; empty: none, no hook is attached.", json_schema_extra=APPLIED
    )
    process_faults: list[ProcessFaultSpec] = Field(
        [], description="Ranks ended, stopped or slowed on purpose; empty: none.", json_schema_extra=APPLIED
    )
    delay: list[DelaySpec] = Field(
        [],
        description="Delays before micro-batches on purpose; all that fit are added; empty: none, no hook is attached.",
        json_schema_extra=APPLIED,
    )
    logging: LoggingSection
