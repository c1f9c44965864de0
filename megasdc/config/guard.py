"""Sections of a guard, the protection of a training that is not megasdc's own: the file of ``megasdc.attach``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megasdc.config.detection import PolicySection, StepChecksSection, default_budget
from megasdc.config.fields import (
    NO_MATTER,
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
from megasdc.config.hooks import HookSpec
from megasdc.config.sections import DeterminismSection, SuperviseSection

Policy = Literal["halt", "warn"]
_CHECKS = "audit.enabled or golden.path or sdc.always_on.enabled"
"""Settings of which at least one must be on for a finding, in the form of `Needs.settings`."""


class GuardAuditSection(Section):
    """Batches that all replicas compute alike, beside training, so that every result of them can be compared."""

    needs = tunes("audit.enabled")

    enabled: bool = setting(True, "Audit the first step after attaching, and every `interval` steps.")
    interval: PositiveInt = setting(100, "Steps K from one audit to the next.")
    submodules: Annotated[list[str], Field(min_length=1)] | None = setting(
        None,
        "Patterns of the names of submodules whose results are compared, such as `*.mlp.*`; null: all without others "
        "inside, and attention.",
        needs=tunes("audit.enabled or golden.path or trace.enabled"),
    )
    permuted: bool = setting(
        False,
        "Also compute the batch once more on each rank with the elements of all operations in other places, which "
        "finds a unit that is wrong each time; audits of one replica need it.",
        needs=asks("audit.enabled"),
    )
    seed: NonNegativeInt = setting(1234, "Of what the batches draw themselves, such as dropout.")


class GuardPolicySection(PolicySection):
    """Actions after a finding, by verdict.

    halt: the step is not taken, an incident report is written, and all ranks exit with the corruption code.
    warn: an incident report is written, and training goes on.
    """

    needs = asks(_CHECKS)

    persistent: Policy = setting("halt", "The rank computes the same wrong value each time.")
    intermittent: Policy = setting("halt", "The rank is wrong again, but not always or not equally.")
    not_reproduced: Policy = setting("warn", "The rank was right in all repeats; nothing of the audit is trained on.")
    inconclusive: Policy = setting("halt", "Ranks differ, but none can be named.")


class GuardAlwaysOnSection(StepChecksSection):
    """Checks of every step."""

    needs = tunes("sdc.always_on.enabled")

    parameters: bool = setting(
        True,
        "Compare the parameters of all replicas, without ZeRO the optimizer's states too, before each optimizer step.",
    )


class GuardSdcSection(Section):
    """Checks of every step, and consequences of any finding."""

    needs = tunes(_CHECKS)

    always_on: GuardAlwaysOnSection = section(GuardAlwaysOnSection)
    budget: float | None = setting(
        None,
        "Largest share of the time of training that sums of rows and slices may take, which how often they look "
        "follows while the training goes on; null: 0.01, with one replica 0.02.",
        needs=tunes("sdc.always_on.enabled"),
        gt=0,
        le=1,
    )
    repeats: PositiveInt = setting(5, "How often a disputed batch is computed again.")
    referee: bool = setting(
        True,
        "Compute results that ranks disagree on in fp64, which names one of two that differ.",
    )
    policy: GuardPolicySection = section(GuardPolicySection)

    def budget_of(self, replicas: int) -> float:
        """``budget``, or its default for a number of replicas."""
        return self.budget or default_budget(replicas)


class GuardGoldenSection(Section):
    """Comparison of the model's results for seeded parameters with those of trusted hardware."""

    path: str | None = setting(None, "Golden file; null: nothing is compared.")
    record: bool = setting(
        False, "Write the file in the first step, in place of comparing with it.", needs=asks("golden.path")
    )
    interval: PositiveInt = setting(
        1000, "Steps from one comparison to the next; the first step is always compared.", needs=tunes("golden.path")
    )
    seed: NonNegativeInt = setting(
        1234, "Of parameters, and of what the model draws itself.", needs=tunes("golden.path")
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


class GuardHealthSection(Section):
    """Detection of hangs and stragglers with `megasdc run`, from the phases and steps that the guard reports."""

    hang_after_s: NonNegativeFloat = setting(
        900.0,
        "Seconds without progress on any rank after which the run is stuck, and is ended, where phases are unknown or "
        "were seldom timed yet; 0: nothing watches.",
    )
    hang_floor_s: PositiveFloat = setting(
        60.0,
        "Least such seconds in phases that were timed: ten times the 99th percentile of their durations.",
        needs=tunes("health.hang_after_s"),
    )
    slow_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = setting(
        1.05, "A rank whose forward passes take so many times as long as those of its peers is a straggler; null: none."
    )
    alert_command: list[str] = setting(
        [],
        "Program and arguments, run without a shell for at most 10 s with each incident as JSON on standard input: a "
        "run that is stuck, a finding of corruption. Empty: none.",
        NO_MATTER,
    )


class GuardSettings(Section):
    """The whole file, for `megasdc.attach` and `megasdc run` alike."""

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
