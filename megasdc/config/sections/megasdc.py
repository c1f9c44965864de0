"""Typed sections of the ``megasdc`` key, one class each.

The description of every field states its meaning, unit, range and what null means; the documentation's table is
generated from it. A section is read only by the part of the package that it configures.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megasdc.addresses import PHASES
from megasdc.config.fields import (
    APPLIED,
    FLAG,
    NO_MATTER,
    REFUSED,
    UNIVERSAL,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)
from megasdc.config.sections.delay import DelaySpec
from megasdc.config.sections.detection import AuditSection, SdcSection
from megasdc.config.sections.drop_compute import DropComputeSection
from megasdc.config.sections.faults import FaultSpec, ProcessFaultSpec
from megasdc.config.sections.optimizer_hooks import HookSpec
from megasdc.config.sections.study import StudySection


class ModelSection(Section):
    """The GPT to train: a preset, single sizes, or a preset with some sizes changed."""

    preset: str | None = Field(
        None, description="Name of a preset size; null: sizes are given field by field.", json_schema_extra=NO_MATTER
    )
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = Field(
        2, description="Number of transformer layers.", json_schema_extra=REFUSED
    )
    hidden_size: PositiveInt = Field(128, description="Width h of the residual stream.", json_schema_extra=REFUSED)
    num_attention_heads: PositiveInt = Field(4, description="Number of query heads.", json_schema_extra=REFUSED)
    num_query_groups: PositiveInt | None = Field(
        None,
        description="Number of key/value heads (grouped-query attention); null: as many as query heads.",
        json_schema_extra=REFUSED,
    )
    kv_channels: PositiveInt | None = Field(
        None, description="Width of one head; null: hidden_size / num_attention_heads.", json_schema_extra=REFUSED
    )
    ffn_hidden_size: PositiveInt | None = Field(
        None,
        description="Width of the MLP; null: 4 h, or with a gated MLP 8/3 h rounded up to a multiple of 64.",
        json_schema_extra=REFUSED,
    )
    max_positions: PositiveInt = Field(
        2048,
        description="Longest sequence the model can see, in tokens; size of the learned position table.",
        json_schema_extra=FLAG,
    )
    position_embedding: Literal["learned", "rope"] = Field(
        "learned", description="Kind of position information.", json_schema_extra=REFUSED
    )
    rotary_base: PositiveInt = Field(
        10000, description="Base of the rotary frequencies; read with rope only.", json_schema_extra=FLAG
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = Field(
        "LayerNorm", description="Kind of normalisation.", json_schema_extra=REFUSED
    )
    norm_epsilon: PositiveFloat = Field(
        1e-5, description="Added to the variance in every normalisation.", json_schema_extra=FLAG
    )
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = Field(
        "gelu_tanh",
        description="MLP activation; gelu_tanh is GPT-2's tanh approximation of GELU.",
        json_schema_extra=FLAG,
    )
    gated_mlp: bool = Field(False, description="Gate the MLP; silu with a gate is SwiGLU.", json_schema_extra=REFUSED)
    bias: bool = Field(True, description="Biases in the linear layers of attention and MLP.", json_schema_extra=REFUSED)
    qkv_bias: bool = Field(
        False, description="A bias on query, key and value also where `bias` is false.", json_schema_extra=REFUSED
    )
    tie_embeddings: bool = Field(True, description="Output weights are the word embedding.", json_schema_extra=REFUSED)
    hidden_dropout: Probability = Field(
        0.0, description="Dropout on embeddings and residual branches, in [0, 1).", json_schema_extra=FLAG
    )
    attention_dropout: Probability = Field(
        0.0,
        description="Dropout on attention probabilities, in [0, 1); above 0 attention is computed unfused.",
        json_schema_extra=FLAG,
    )
    init_std: PositiveFloat = Field(0.02, description="Standard deviation of initial weights.", json_schema_extra=FLAG)
    vocab_multiple: PositiveInt = Field(
        128,
        description="The vocabulary is padded to a multiple of this; must be divisible by every tensor size used.",
        json_schema_extra=FLAG,
    )
    backend: Literal["torch", "transformer_engine"] = Field(
        "torch",
        description="Submodules from plain PyTorch (CPU and GPU) or from Transformer Engine (GPU, installed apart).",
        json_schema_extra=FLAG,
    )
    fuse: bool = Field(
        False,
        description="Norms, rotary embedding, activation, residual sums and cross-entropy compiled, each alone; "
        "needs backend torch and a C++ compiler (on a GPU Triton and a C compiler).",
        json_schema_extra=FLAG,
    )
    initial_weights: str | None = Field(
        None,
        description="Folder made by `megasdc import-hf`; its weights are used at step 0 only; null: random weights.",
        json_schema_extra=NO_MATTER,
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of Megatron-core's TransformerConfig that have effect, by name; applied last.",
        json_schema_extra=FLAG,
    )


class SourceSection(Section):
    """One source of text for `prepare-data`."""

    at_resume = "-"

    kind: Literal["stdlib", "files", "hub"] = Field(
        "stdlib",
        description="stdlib: text of the running Python's standard library; files: local files or folders; "
        "hub: a dataset by its Hugging Face name.",
    )
    path: str | None = Field(
        None,
        description="files: a file, a folder or a glob of .txt, .jsonl, .parquet (.gz and .zst too); hub: its name.",
    )
    name: str | None = Field(None, description="hub: configuration name, such as `en` of allenai/c4.")
    split: str = Field("train", description="hub: which split to read.")
    revision: str | None = Field(None, description="hub: commit, tag or branch to read; null: the newest.")
    text_field: str = Field("text", description="Column or JSON key that holds the text.")
    text_unit: Literal["file", "paragraph", "line"] = Field(
        "file", description="files: what one document of a .txt file is; paragraphs are divided by empty lines."
    )
    streaming: bool = Field(False, description="hub: read without downloading the whole dataset first.")
    max_documents: PositiveInt | None = Field(None, description="Stop after so many documents; null: all.")
    pattern: str | None = Field(
        None,
        description="stdlib: only files that match this glob below the library's folder, such as `json/*.py` or "
        "`*/**/*.py` (`**`: any number of folders); null: all.",
    )


class TokenizerSection(Section):
    """The tokenizer that `prepare-data` trains or loads."""

    at_resume = "-"

    kind: Literal["sentencepiece", "huggingface"] = Field("sentencepiece", description="Tokenizer library.")
    path: str | None = Field(
        None,
        description="sentencepiece: a .model file, null: train one on the sources; huggingface: a folder or hub name.",
    )
    vocab_size: PositiveInt = Field(8192, description="Pieces of a SentencePiece model trained here.")
    model_type: Literal["bpe", "unigram"] = Field("bpe", description="Algorithm of a SentencePiece model trained here.")
    train_characters: PositiveInt = Field(
        20_000_000, description="Characters of text, evenly sampled, that a SentencePiece model is trained on."
    )


class BlendSection(Section):
    """One folder of prepared data in a blend."""

    at_resume = "universal"

    path: str = Field(..., description="Folder of prepared data.", json_schema_extra=APPLIED)
    weight: PositiveFloat = Field(..., description="Its share of the samples, relative to the other weights.")


class DataSection(Section):
    """Where the tokens are and how they are cut into samples."""

    path: str = Field(
        ..., description="Folder of prepared data (the output of `megasdc prepare-data`).", json_schema_extra=APPLIED
    )
    blend: list[BlendSection] = Field(
        default_factory=list,
        description="Folders to draw samples from, each with its weight; `path` must be one of them, and all must have "
        "been prepared with one tokenizer. Empty: `path` alone.",
        json_schema_extra=UNIVERSAL,
    )
    sequence_length: PositiveInt = Field(512, description="Tokens s of one sample.", json_schema_extra=UNIVERSAL)
    split: list[NonNegativeInt] = Field(
        [98, 1, 1],
        min_length=3,
        max_length=3,
        description="Shares of the documents for train, validation and test; fixed when the data are prepared.",
        json_schema_extra=FLAG,
    )
    seed: NonNegativeInt = Field(
        1234, description="Seed of the order of documents and samples.", json_schema_extra=UNIVERSAL
    )
    mask_end_of_document: bool = Field(
        False,
        description="Exclude the loss at end-of-document tokens from every sum and average.",
        json_schema_extra=FLAG,
    )
    sources: list[SourceSection] = Field(
        default_factory=lambda: [SourceSection.model_validate({})],
        min_length=1,
        description="What `prepare-data` reads, in this order.",
        json_schema_extra=NO_MATTER,
    )
    tokenizer: TokenizerSection = Field(
        default_factory=lambda: TokenizerSection.model_validate({}), description="What `prepare-data` tokenizes with."
    )

    @property
    def folders(self) -> list[str]:
        """All folders of the samples, in the order of the blend."""
        return [part.path for part in self.blend] or [self.path]


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

    model: ModelSection = Field(default_factory=lambda: ModelSection.model_validate({}))
    data: DataSection
    parallel: ParallelSection = Field(default_factory=lambda: ParallelSection.model_validate({}))
    training: TrainingSection
    determinism: DeterminismSection = Field(default_factory=lambda: DeterminismSection.model_validate({}))
    checkpoint: CheckpointSection = Field(default_factory=lambda: CheckpointSection.model_validate({}))
    trace: TraceSection = Field(default_factory=lambda: TraceSection.model_validate({}))
    golden: GoldenSection = Field(default_factory=lambda: GoldenSection.model_validate({}))
    sdc: SdcSection = Field(default_factory=lambda: SdcSection.model_validate({}))
    audit: AuditSection = Field(default_factory=lambda: AuditSection.model_validate({}))
    study: StudySection = Field(default_factory=lambda: StudySection.model_validate({}))
    drop_compute: DropComputeSection = Field(default_factory=lambda: DropComputeSection.model_validate({}))
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
