"""Typed sections of the ``megasdc`` key, one class each; those of a subject with a file of its own are in that file.

The description of every field states its meaning, unit, range and what null means; the documentation's table is
generated from it. A section is read only by the part of the package that it configures.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megasdc.common.addresses import PHASES
from megasdc.config.data import DataSection
from megasdc.config.detection import CHECKS, AuditSection, SdcSection
from megasdc.config.drop_compute import DropComputeSection
from megasdc.config.faults import DelaySpec, FaultSpec, ProcessFaultSpec
from megasdc.config.fields import (
    APPLIED,
    FLAG,
    NO_MATTER,
    UNIVERSAL,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    asks,
    section,
    setting,
    tunes,
)
from megasdc.config.hooks import HookSpec, UserHook
from megasdc.config.local_sgd import LocalSgdSection
from megasdc.config.model import ModelSection


class ParallelSection(Section):
    """How the ranks divide the model; data parallel is what remains: world size / (tensor x pipeline)."""

    tensor: PositiveInt = setting(1, "Tensor-parallel ranks (TP).", UNIVERSAL)
    pipeline: PositiveInt = setting(1, "Pipeline stages (PP).", UNIVERSAL)
    sequence_parallel: bool = setting(
        False, "Split norms and dropout along the sequence over the tensor ranks; needs tensor > 1.", APPLIED
    )
    partition: Literal["uniform", "parameters"] | list[PositiveInt] = setting(
        "uniform",
        "Transformer layers of each stage: equal counts, equal numbers of parameters, or given counts.",
        UNIVERSAL,
    )
    timeout_s: Annotated[float, Field(ge=1, le=1e9)] = setting(
        1800.0,
        "Seconds after which a collective times out, set on every process group; also those within which all ranks "
        "must have connected at the start.",
        NO_MATTER,
    )
    threads: Annotated[int, Field(ge=0, le=1024)] = setting(
        1, "CPU threads of a rank on machines without an accelerator; 0: PyTorch's own choice.", APPLIED
    )
    share_devices: bool = setting(
        False,
        "Let the ranks of a host share its GPUs, assigned round robin; collectives use gloo through host memory, "
        "since NCCL refuses two ranks on one GPU; slow, to try a layout where GPUs are few.",
        APPLIED,
    )


class TrainingSection(Section):
    """How long to train, and when to evaluate and stop."""

    steps: PositiveInt = setting(..., "Optimizer steps of the whole run, resumed parts included.", APPLIED)
    seed: NonNegativeInt = setting(1234, "Seed of initial weights and dropout.", UNIVERSAL)
    eval_interval: NonNegativeInt = setting(0, "Steps between evaluations; 0: none.", APPLIED)
    eval_samples: PositiveInt = setting(
        64, "Validation samples of one evaluation, the same each time; rounded up to whole micro-batches.", APPLIED
    )
    time_limit_s: PositiveFloat | None = setting(
        None,
        "Save and stop at the first step boundary after so many seconds, the start included; null: no limit.",
        NO_MATTER,
    )
    stop_step: PositiveInt | None = setting(
        None, "Save and stop after this step although the run is longer; null: continue to `steps`.", NO_MATTER
    )
    max_skipped_steps: PositiveInt = setting(
        100, "Stop with the non-finite exit code after so many skipped steps in a row.", APPLIED
    )
    garbage_collection: Literal["python", "managed"] = setting(
        "python",
        "python: Python collects garbage whenever it does by itself, each rank at another moment; managed: all ranks "
        "at the end of the same steps, ignoring objects created before the first collection.",
        NO_MATTER,
    )
    garbage_collection_interval: PositiveInt = setting(
        50,
        "managed: steps between collections; memory that only garbage in cycles holds stays taken so long.",
        NO_MATTER,
        asks('training.garbage_collection="managed"'),
    )


class DeterminismSection(Section):
    """Whether two runs on machines of one kind must agree in every bit."""

    at_resume = "applied"

    enabled: bool = setting(
        False,
        "Choose only what repeats bit for bit in PyTorch, cuBLAS, cuDNN, NCCL, Megatron-core and Transformer Engine; "
        "an operation that cannot raises. false: nothing is set.",
    )
    fill_uninitialized_memory: bool = setting(
        False,
        "Fill every new tensor with NaN before it is written, to find reads of uninitialised memory; slow, and not "
        "needed to repeat a run.",
        needs=asks("determinism.enabled"),
    )


class MemorySection(Section):
    """Checkpoints in the memory of hosts, for restarts of ranks that died."""

    at_resume = "-"

    interval: NonNegativeInt = setting(0, "Steps between snapshots that stay in memory; 0: none are kept there.")
    partners: bool | None = setting(
        False,
        "Keep each host's snapshots in the memory of another one too, so that a lost host loses nothing; null: where "
        "the run has two hosts or more.",
        needs=asks("checkpoint.memory.interval"),
    )
    linger_s: NonNegativeFloat = setting(
        600.0,
        "Seconds that they stay after the ranks of a host have failed, if no restart takes them.",
        needs=asks("checkpoint.memory.interval"),
    )
    without_room: Literal["refuse", "go_on"] = setting(
        "refuse",
        "Where the memory of a host has no room for them: refuse: the run ends after its first step; go_on: it goes on "
        "without new ones, and says so, which `megasdc supervise` sets where no other host can be used.",
        needs=tunes("checkpoint.memory.interval"),
    )


class ArchiveSection(Section):
    """Archive of a run's checkpoints, written while it trains."""

    at_resume = "-"

    address: str | None = setting(
        None,
        "Folder or URL of fsspec, such as s3://bucket/archive, without credentials; null: nothing is archived.",
        min_length=1,
    )
    every: PositiveInt = setting(
        1,
        "Checkpoints whose step is a multiple are archived, and the last of the run; 1: all.",
        needs=asks("checkpoint.archive.address"),
    )
    keep_last: NonNegativeInt = setting(
        0,
        "Newest steps of this run that the archive keeps; 0: all. `megasdc archive prune` has more rules.",
        needs=asks("checkpoint.archive.address"),
    )


class CheckpointSection(Section):
    """When and where to save, what to keep, what to resume from."""

    at_resume = "-"

    folder: str | None = setting(None, "Folder of checkpoints; null: `checkpoints` in the run folder.")
    interval: NonNegativeInt = setting(0, "Steps between checkpoints; 0: only at the end.")
    keep_last: NonNegativeInt = setting(2, "Newest checkpoints kept; 0: all.")
    keep_every: NonNegativeInt = setting(0, "Checkpoints whose step is a multiple are kept too; 0: none.")
    writing: Literal["auto", "async", "sync"] = setting(
        "auto",
        "async: checkpoints are written beside training, from a snapshot in memory; sync: training waits; auto: async "
        "where memory of every host has room and the state of a rank is 64 MiB or more.",
    )
    when_late: Literal["wait", "skip"] = setting(
        "wait",
        "Where a checkpoint is due and the one before is not written yet: wait for that, or skip the new one.",
        needs=asks('checkpoint.writing="auto" or checkpoint.writing="async"'),
    )
    storage: Literal["shared", "node_local"] = setting(
        "shared", "Whether all nodes see one checkpoint folder or each node has its own.", UNIVERSAL
    )
    memory: MemorySection = section(MemorySection)
    resume: Literal["auto", "never", "must"] = setting(
        "auto",
        "auto: from the newest complete checkpoint if there is one; must: fail if there is none; never: refuse a "
        "folder that holds one.",
    )
    resume_at_most: NonNegativeInt | None = setting(
        None,
        "Newest step to resume from: newer checkpoints are moved to `unverified`, and steps in memory are passed over; "
        "without an older one the run begins anew. null: the newest of all.",
    )
    other_layout: Literal["refuse", "convert"] = setting(
        "refuse",
        "Where the newest checkpoint, or step in memory, has another layout than the run: refuse: the start fails; "
        "convert: each rank reads the parts of its files that it owns now. Needs shared storage.",
    )
    verify: bool = setting(True, "Check sizes and checksums of every file before resuming.")
    require_verified: Literal["auto", "always", "never"] = setting(
        "auto",
        "Resume only from a checkpoint after which an audit agreed; auto: where the run before has ended because of "
        "corruption. Newer ones are moved to `unverified`.",
    )
    universal: str | None = setting(
        None,
        "Folder of a universal checkpoint to start from, at any layout; used only when the run's checkpoint folder "
        "holds no checkpoint; null: none.",
        min_length=1,
    )
    universal_without: list[Literal["loader", "hooks"]] = setting(
        [],
        "What `universal` may lack: loader: the data start again at their first sample; hooks: hooks begin without "
        "their saved states.",
    )
    archive: ArchiveSection = section(ArchiveSection)


class LoggingSection(Section):
    """Folder of a run's files, and intervals of its reports."""

    at_resume = "-"

    run_dir: str = setting(..., "Folder of this run; created if absent.")
    interval: PositiveInt = setting(10, "Steps between reported lines and metrics.")
    progress_bar: bool = setting(True, "A progress bar with ETA where rank 0 writes to a terminal.")
    wait_for_room_s: NonNegativeFloat = setting(
        900.0,
        "Seconds that a run waits while its folder has no room (full, a quota, read-only), or its events and metrics "
        "meet a disk that fails: it trains on, and what it writes is kept and written later; then it stops with exit "
        "code 77. 0: it ends at the first such write.",
    )
    peak_tflops: PositiveFloat | None = setting(
        None, "Peak TFLOP/s of one device for MFU; null: from a table of known GPUs, else not reported."
    )
    prometheus: str | None = setting(
        None,
        'Address and port, such as "127.0.0.1:9400", at which rank 0 serves its metrics to Prometheus, without a '
        "password; null: it listens nowhere.",
    )
    wandb_runs: Literal["one", "each_start"] = setting(
        "one",
        "Runs of Weights & Biases, where `wandb` is enabled. one: all starts are one, by the id in `run.json`, and "
        "steps that are done again are not sent again; each_start: one for each start, in a group.",
    )


class TraceSection(Section):
    """Exact checksums of what every submodule computes, written to the run folder."""

    at_resume = "applied"

    enabled: bool = setting(False, "Record a trace; off: no hook is attached anywhere.")
    granularity: Literal["layer", "submodule", "gemm"] = setting(
        "gemm",
        "layer: results of whole layers, embedding, output and loss; submodule: also norms, attention, MLP and "
        "residual sums; gemm: also every linear layer.",
    )
    phases: list[Literal[PHASES]] = setting(  # type: ignore[valid-type]
        list(PHASES), "Phases that are recorded.", min_length=1
    )
    interval: PositiveInt = setting(1, "Steps between recorded steps; the first is always recorded.")
    micro_batches: list[NonNegativeInt] | None = setting(
        None, "Micro-batches of a step that are recorded, the first is 0; null: all."
    )
    layers: list[NonNegativeInt] | None = setting(
        None,
        "Places of layers in the pipeline that are recorded: 0 word embedding, 1 positions, 2 the first transformer "
        "layer; null: all.",
    )
    algorithm: Literal["xxh3_64.v1", "mixed_sum_64.v1"] | None = setting(
        None, "Checksum algorithm; null: the fastest for the device, the first on a CPU."
    )
    details: bool = setting(
        False,
        "Also write to `details.jsonl` what each step was made of: losses of samples; gradients, "
        "updates and moments of parameters. Waits for the device, and keeps a copy of the fp32 weights.",
        needs=asks("trace.enabled"),
    )


class GoldenSection(Section):
    """The workload of golden traces: seeded weights and tokens, no corpus; `trace` says what is recorded of it."""

    at_resume = "applied"

    steps: PositiveInt = setting(2, "Optimizer steps of one run.")
    micro_batches: PositiveInt = setting(2, "Micro-batches of a step on each replica.")
    micro_batch_size: PositiveInt = setting(1, "Samples of a micro-batch; more fill the device.")
    sequence_lengths: Annotated[list[PositiveInt], Field(min_length=1)] | None = setting(
        None, "Tokens of a sample, one case each; null: `data.sequence_length` alone."
    )
    seeds: PositiveInt = setting(1, "Different tokens for each length; a case each.")
    vocab_size: PositiveInt = setting(8192, "Entries of the vocabulary, instead of a tokenizer's.")


class HangSection(Section):
    """Limits by which a training is stuck, of users' programs too."""

    enabled: bool | None = setting(
        None,
        "Record what each rank is doing, watch it with an agent on each host, and end the run when it is stuck; null: "
        "in runs that a launcher starts, but in no study and no run of a sweep.",
    )
    hang_floor_s: PositiveFloat = setting(
        60.0, "Least seconds without any progress after which a run is stuck; `parallel.timeout_s` still holds."
    )
    slow_floor_s: PositiveFloat = setting(
        900.0,
        "The same for starts, first steps, evaluations, saves, and phases that are unknown or were seldom timed yet.",
    )
    hang_factor: PositiveFloat = setting(
        10.0, "A phase may last this many times the 99th percentile of its durations in this run."
    )


class HealthSection(HangSection):
    """Progress records of every rank, an agent on each host, hangs that are named and ended, and stragglers."""

    at_resume = "applied"
    needs = tunes("health.enabled=null or health.enabled=true")

    slow_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] = setting(
        1.05,
        "A rank whose micro-batches take so many times as long as those of its peers of the same stage is a straggler, "
        "if noise does not explain it; above 1. Healthy devices of one kind differ by less.",
    )
    ping_interval: NonNegativeInt = setting(
        200, "Steps between measurements of the links between hosts, of a few milliseconds; 0: never."
    )
    alert_command: list[str] = setting(
        [],
        "Program and arguments, run without a shell for at most 10 s with each incident as JSON on standard input: a "
        "run that is stuck (with `enabled`), a finding of corruption. Empty: none.",
        NO_MATTER,
        asks(f"health.enabled=null or health.enabled=true or {CHECKS}"),
    )

    def is_on(self, *, launched: bool, studied: bool) -> bool:
        """Whether a run is watched.

        Args:
            launched: whether its ranks are processes that a launcher has started, which an agent can end.
            studied: whether it is part of a study.
        """
        return launched and not studied if self.enabled is None else self.enabled


COMPUTATION_SYNC, PARAMETER_SYNC, FREE_RUN = "computation_sync", "parameter_sync", "free_run"
PAPER_FORWARD = ("*.word_embeddings", "*.self_attention.linear_proj", "*.mlp.linear_fc2", "*.output")
PAPER_BACKWARD = ("*.self_attention.linear_qkv", "*.mlp.linear_fc1", "*.output")
"""Submodules whose results are those of attention and FFN before the sum over tensor ranks; embedding and head."""


class StudySection(Section):
    """Several whole runs in one launch, one of them trusted (Ma et al. 2025, arXiv 2502.12340)."""

    at_resume = "applied"
    needs = asks("study.mode")

    mode: Literal["computation_sync", "parameter_sync", "free_run"] | None = setting(
        None,
        "computation_sync: every result is compared with the trusted replica's and overwritten by it; parameter_sync: "
        "gradients are compared, and after each step parameters and optimizer state are overwritten; free_run: "
        "nothing is overwritten, parameters are compared; null: no study.",
        FLAG,
    )
    replicas: Annotated[int, Field(ge=2)] | None = setting(
        None,
        "Replicas of the study, each a whole run of (ranks of the launch / replicas) ranks with a folder `replica_K` "
        "in `logging.run_dir`; needed with a mode.",
        FLAG,
    )
    trusted: NonNegativeInt = setting(0, "The replica that counts as healthy.", FLAG)
    submodules: Annotated[list[str], Field(min_length=1)] | None = setting(
        None,
        "computation_sync: patterns of full names whose forward and backward results are compared; null: attention "
        "and FFN before the sum over tensor ranks, embedding and head. Weight gradients, optimizer and parameters are "
        "always compared.",
        needs=asks('study.mode="computation_sync"'),
    )
    interval: PositiveInt = setting(
        10,
        "computation_sync: steps between lines that count what was compared; free_run: steps between comparisons of "
        "parameters.",
        needs=asks('study.mode="computation_sync" or study.mode="free_run"'),
    )
    sampled_elements: NonNegativeInt = setting(
        8,
        "computation_sync: wrong elements of a result that are written one by one, evenly chosen.",
        needs=asks('study.mode="computation_sync"'),
    )


_TESTS = "supervise.returns or supervise.spare_test_s or supervise.ledger"
"""Settings that make a run test hosts, in the form of `Needs.settings`."""


class SuperviseSection(Section):
    """Reactions of `megasdc supervise` to failures; other starts do not read it."""

    at_resume = "-"

    num_hosts: PositiveInt | None = setting(
        None,
        "Hosts that the run uses, the first of the hostfile or of the SLURM job; the others are spares. null: all, and "
        "no spare.",
    )
    min_hosts: PositiveInt | None = setting(
        None,
        "With so many hosts at least the run goes on where others are lacking: with fewer replicas, the same samples a "
        "step, and with all again once they can be used. Needs shared storage. null: never with fewer than "
        "`num_hosts`.",
    )
    failures_per_hour: PositiveInt = setting(20, "More failures within an hour end the run.")
    without_progress: PositiveInt = setting(
        50, "So many failures after the first one that got no further than that end the run."
    )
    failed_starts: PositiveInt = setting(
        10,
        "So many starts in succession that fail before a step end the run; lost hosts and processes that were killed "
        "from outside do not count.",
    )
    same_step: PositiveInt = setting(
        3,
        "So many failures of one kind in succession at one step that each attempt reached itself, not all on the same "
        "hosts, end the run: it is no hardware. Lost hosts and processes that were killed from outside do not count.",
    )
    pause_s: NonNegativeFloat = setting(
        5.0, "Seconds before an attempt is repeated where the one before got no further; doubled each time."
    )
    longest_pause_s: NonNegativeFloat = setting(300.0, "The longest such pause.")
    returns: NonNegativeInt = setting(
        1,
        "Times that a host which was replaced becomes a spare again after it has passed a test by `megasdc stress`; 0: "
        "replaced hosts are not tested.",
    )
    test_rounds: PositiveInt = setting(3, "Rounds of such a test.", needs=tunes(_TESTS))
    golden: str | None = setting(
        None,
        "Folder of golden values for the test; null: a host is compared with itself alone, so that what it always "
        "computes wrong is not found.",
        needs=asks(_TESTS),
        min_length=1,
    )
    retest_s: PositiveFloat = setting(
        300.0, "Seconds until a host that could not be tested is tested again.", needs=tunes(_TESTS)
    )
    spare_test_s: NonNegativeFloat = setting(
        3600.0, "Seconds between tests of a host that waits as a spare, the first when the run begins; 0: none."
    )
    ledger: str | None = setting(
        None,
        "File in which all runs of a cluster keep how often each host has failed; hosts that failed much more often "
        "than others are not used before they have passed a test. null: nothing is kept.",
        min_length=1,
    )
    ledger_days: PositiveFloat = setting(
        30.0, "What is older in the ledger does not count.", needs=tunes("supervise.ledger")
    )
    rewind_steps: NonNegativeInt = setting(
        0,
        "Where NaN and Inf come again after a restart: go back to a checkpoint at least so many steps before the first "
        "of them, and never train on the samples from there to the last of them; 0: the run ends, no data are skipped.",
    )
    rewinds: NonNegativeInt = setting(
        3, "Times that a run goes back, for that or because a checkpoint cannot be loaded; 0: it ends instead."
    )


OFF, STANDARD, STRICT = "off", "standard", "strict"
"""Words of `protect`."""


class MegasdcSection(Section):
    """All sections of the `megasdc` key."""

    protect: Literal["off", "standard", "strict"] = setting(
        STANDARD,
        "Preset of fields that protect a run, of which those that the file gives win: off: none; standard: "
        "deterministic mode, audits, checks of every step within `sdc.budget`, snapshots in memory; what is found is "
        "repaired, or else halts the run, and checks change no bit of the training; strict: the same, but any finding "
        "halts. A run that was begun with another word, or before there were any, goes on as it began where a "
        "file has none.",
        APPLIED,
    )

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
    local_sgd: LocalSgdSection = section(LocalSgdSection)
    health: HealthSection = section(HealthSection)
    supervise: SuperviseSection = section(SuperviseSection)
    optimizer_hooks: list[HookSpec] = setting(
        [], "What bounds gradients and resets moments, in this order; empty: nothing.", APPLIED
    )
    hooks: list[UserHook] = setting(
        [],
        "Hooks of your own, called with those of megasdc: each `module:Class` or `file.py:Class`, or an object; empty: "
        "none.",
        APPLIED,
    )
    faults: list[FaultSpec] = setting([], "Faults injected on purpose; empty: none, no hook is attached.", APPLIED)
    process_faults: list[ProcessFaultSpec] = setting(
        [], "Ranks ended, stopped or slowed on purpose; empty: none.", APPLIED
    )
    delay: list[DelaySpec] = setting(
        [], "Delays before micro-batches on purpose; all that fit are added; empty: none, no hook is attached.", APPLIED
    )
    logging: LoggingSection
