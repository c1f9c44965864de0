"""Sections of a guard, the protection of a training that is not megasdc's own: the file of ``megasdc.attach``.

What a run's configuration has too has the same name and meaning there; what only runs can do is refused with why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megasdc.config.detection import (
    ALWAYS_ON,
    CHECKS,
    AuditTimes,
    ChecksSection,
    Policy,
    PolicySection,
    StepChecksSection,
)
from megasdc.config.fields import (
    ALWAYS_READ,
    NO_MATTER,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    asks,
    section,
    setting,
    tunes,
)
from megasdc.config.hooks import HookSpec
from megasdc.config.sections import OFF, DeterminismSection, HangSection, SuperviseSection

EARLIER_NAMES = {
    "golden.path": "sdc.golden",
    "golden.interval": "sdc.golden_interval",
    "health.hang_after_s": "health.slow_floor_s",
}
"""Keys of earlier versions, and their names now; both are read."""
_MEGASDC = "its loop, model, data and ranks are the program's"
_SUBMODULES = "`audit.submodules` says which are recorded"
RUNS_ONLY = {
    "audit.granularity": "`audit.submodules` says which are compared",
    "audit.micro_batch": "what it compares is always beside training",
    "audit.verify_checkpoints": "when the loop saves is not known; an audit that agrees verifies what was saved before",
    "sdc.always_on.recompute": "of training a guard sees what a trace and one product need; this needs every forward "
    "result and its recomputation",
    "sdc.always_on.chain": "it needs the numbers by which DeepSpeed's optimizer takes the norm and clips",
    "sdc.always_on.finite": "`nonfinite.enabled` looks in each step",
    "sdc.always_on.tokens": "it needs the file of the data, which the loop reads",
    "sdc.always_on.coverage": "`sdc.budget` says how often checks look",
    "sdc.always_on.granularity": "none of a guard's checks of every step observes submodules",
    "sdc.golden_at_start": "the first step is always compared",
    "sdc.isolation": "the others would have to build groups, model and data again, which the program would have to do",
    **{f"trace.{name}": _SUBMODULES for name in ("granularity", "layers")},
    **dict.fromkeys(("trace.phases", "trace.micro_batches", "trace.details"), "a guard records all that it can"),
    "trace.algorithm": "it is the fastest for the device",
    **{
        f"golden.{name}": "the workload is the program's own model and batch"
        for name in ("steps", "micro_batches", "micro_batch_size", "sequence_lengths", "seeds", "vocab_size")
    },
    "health.ping_interval": "between hosts nothing is measured while a program trains; `megasdc stress` does so before",
    **{
        f"logging.{name}": "the program reports its steps itself"
        for name in ("progress_bar", "peak_tflops", "prometheus", "wandb_runs")
    },
    **dict.fromkeys(
        ("model", "data", "parallel", "training", "checkpoint", "study", "drop_compute", "local_sgd", "hooks"), _MEGASDC
    ),
    **dict.fromkeys(("faults", "process_faults", "delay"), "only megasdc's own runs inject them"),
}
"""Keys and sections of a run's configuration that a guard does not have, and why."""


class GuardAuditSection(AuditTimes, Section):
    """Batches that all replicas compute alike, beside training, so that every result of them can be compared."""

    needs = tunes("audit.enabled")

    enabled: bool = setting(True, "Audit the first step after attaching, and every `interval` steps.")
    interval: PositiveInt = setting(100, "Steps K from one audit to the next.")
    submodules: Annotated[list[str], Field(min_length=1)] | None = setting(
        None,
        "Patterns of the names of submodules whose results are compared, such as `*.mlp.*`; null: all without others "
        "inside, and attention.",
        needs=tunes("audit.enabled or sdc.golden or trace.enabled"),
    )
    permuted: bool | None = setting(
        False,
        "Also compute the batch once more on each rank with the elements of all operations in other places, which "
        "finds a unit that is wrong each time; audits of one replica need it; null: where there is one replica.",
        needs=asks("audit.enabled"),
    )
    longest_interval: PositiveInt | None = setting(
        None,
        "Steps up to which `interval` is doubled while audits take more than half of `sdc.budget`, of which they are "
        "part then; null: it never is.",
        needs=asks("audit.enabled", ALWAYS_ON, "sdc.always_on.rows or sdc.always_on.slice_elements"),
    )
    seed: NonNegativeInt = setting(1234, "Of what the batches draw themselves, such as dropout.")


class GuardPolicySection(PolicySection):
    """Actions after a finding, by verdict: ``halt`` or ``warn``.

    halt: the step is not taken, an incident report is written, and all ranks exit with the corruption code.
    warn: an incident report is written, and training goes on.
    """

    not_reproduced: Policy = setting("warn", "The rank was right in all repeats; nothing of the audit is trained on.")


class GuardAlwaysOnSection(StepChecksSection):
    """Checks of every step."""

    needs = tunes("sdc.always_on.enabled")

    parameters: bool = setting(
        True,
        "Compare the parameters of all replicas, without ZeRO the optimizer's states too, before each optimizer step.",
    )


class GuardSdcSection(ChecksSection):
    """Checks of every step, and consequences of any finding."""

    needs = tunes(CHECKS)

    always_on: GuardAlwaysOnSection = section(GuardAlwaysOnSection)
    golden: str | None = setting(
        None,
        "Golden file, with whose trusted results for seeded parameters the model's are compared; null: none.",
        needs=ALWAYS_READ,
        min_length=1,
    )
    golden_interval: PositiveInt = setting(
        1000,
        "Steps from one such comparison to the next; the first step is always compared.",
        needs=tunes("sdc.golden"),
    )
    referee: bool = setting(
        True,
        "Compute results that ranks disagree on in fp64, which names one of two that differ.",
    )
    policy: GuardPolicySection = section(GuardPolicySection)


class GuardGoldenSection(Section):
    """The workload of the golden file."""

    record: bool = setting(
        False, "Write the file in the first step, in place of comparing with it.", needs=asks("sdc.golden")
    )
    seed: NonNegativeInt = setting(
        1234, "Of parameters, and of what the model draws itself.", needs=tunes("sdc.golden")
    )


class GuardNonFiniteSection(Section):
    """The first place of NaN or Inf in a step whose loss or gradients are not finite."""

    needs = tunes("nonfinite.enabled")

    enabled: bool = setting(True, "Look before each optimizer step, and search where something is not finite.")
    keep_mib: NonNegativeInt = setting(
        256,
        "Most MiB of what the model is given in a step that references keep in memory; what is beyond is not searched.",
    )
    searches: PositiveInt = setting(20, "Most searches; each takes as long as the micro-batches of a step.")


class GuardTraceSection(Section):
    """Checksums of what submodules compute in training, written to the run folder."""

    enabled: bool = setting(False, "Record a trace of the submodules that audits compare.")
    interval: PositiveInt = setting(
        1, "Steps between recorded steps; the first is always recorded.", needs=tunes("trace.enabled")
    )


class GuardLoggingSection(Section):
    """Folder of a guard's files, interval of its reports, and wait for room."""

    run_dir: str = setting(..., "Folder of events and incident reports; created if absent.")
    interval: PositiveInt = setting(100, "Steps between reports of bounds.")
    wait_for_room_s: NonNegativeFloat = setting(
        900.0,
        "Seconds that launch and supervisor wait while the run folder has no room (full, a quota, read-only), until "
        "they end with exit code 77; training goes on, and what the guard writes is kept and written later. 0: the "
        "first such write is an error.",
    )


class GuardHealthSection(HangSection):
    """Detection of hangs and stragglers with `megasdc run`, from the phases and steps that the guard reports."""

    needs = tunes("health.enabled")

    enabled: bool = setting(True, "Watch what each rank is doing, and end the run when it is stuck.", needs=ALWAYS_READ)
    slow_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = setting(
        1.05,
        "A rank whose forward passes take so many times as long as those of its peers is a straggler, whoever has "
        "started the ranks; null: none.",
        needs=ALWAYS_READ,
    )
    alert_command: list[str] = setting(
        [],
        "Program and arguments, run without a shell for at most 10 s with each incident as JSON on standard input: a "
        "run that is stuck, a finding of corruption. Empty: none.",
        NO_MATTER,
        tunes(f"health.enabled or {CHECKS}"),
    )


class GuardSettings(Section):
    """The whole file, for `megasdc.attach` and `megasdc run` alike."""

    of_runs_only: ClassVar[Mapping[str, str]] = RUNS_ONLY

    protect: Literal["off", "standard", "strict"] = setting(
        OFF,
        "Preset of fields that protect a training, of which those that the file gives win: off: none; standard: beside "
        "audits, of each device with itself where there is one replica, checks of every step within `sdc.budget`; what "
        "is found is put right, or else ends the training, of which no bit changes; strict: any finding ends it.",
    )
    determinism: DeterminismSection = section(DeterminismSection)
    audit: GuardAuditSection = section(GuardAuditSection)
    sdc: GuardSdcSection = section(GuardSdcSection)
    golden: GuardGoldenSection = section(GuardGoldenSection)
    nonfinite: GuardNonFiniteSection = section(GuardNonFiniteSection)
    trace: GuardTraceSection = section(GuardTraceSection)
    optimizer_hooks: list[HookSpec] = setting([], "What bounds gradients, in this order; empty: nothing.")
    health: GuardHealthSection = section(GuardHealthSection)
    supervise: SuperviseSection = section(SuperviseSection)
    logging: GuardLoggingSection
