"""Sections of a guard, the protection of a training that is not megasdc's own: the file of ``megasdc.attach``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megasdc.config.fields import NonNegativeInt, PositiveInt, Section, section, setting
from megasdc.config.sections.megasdc import DeterminismSection
from megasdc.config.sections.optimizer_hooks import HookSpec

Policy = Literal["halt", "warn"]


class GuardAuditSection(Section):
    """Batches that all replicas compute alike, beside training, so that every result of them can be compared."""

    enabled: bool = setting(True, "Audit the first step after attaching, and every `interval` steps.")
    interval: PositiveInt = setting(100, "Steps K from one audit to the next.")
    submodules: Annotated[list[str], Field(min_length=1)] | None = setting(
        None,
        "Patterns of the names of submodules whose results are compared, such as `*.mlp.*`; null: all without others "
        "inside, and attention.",
    )
    permuted: bool = setting(
        False,
        "Also compute the batch once more on each rank with the elements of all operations in other places, which "
        "finds a unit that is wrong each time; audits of one replica need it.",
    )
    seed: NonNegativeInt = setting(1234, "Of what the batches draw themselves, such as dropout.")


class GuardPolicySection(Section):
    """What happens after a finding, by verdict.

    halt: the step is not taken, an incident report is written, and all ranks exit with the corruption code.
    warn: an incident report is written, and training goes on.
    """

    persistent: Policy = setting("halt", "The rank computes the same wrong value each time.")
    intermittent: Policy = setting("halt", "The rank is wrong again, but not always or not equally.")
    not_reproduced: Policy = setting("warn", "The rank was right in all repeats; nothing of the audit is trained on.")
    inconclusive: Policy = setting("halt", "Ranks differ, but none can be named.")


class GuardSdcSection(Section):
    """What follows from any finding."""

    repeats: PositiveInt = setting(5, "How often a disputed batch is computed again.")
    referee: bool = setting(
        True,
        "Compute results of PyTorch's linear layers, norms and embeddings that ranks disagree on in fp64, which names "
        "one of two that differ.",
    )
    policy: GuardPolicySection = section(GuardPolicySection)


class GuardTraceSection(Section):
    """Checksums of what submodules compute in training, written to the run folder."""

    enabled: bool = setting(False, "Record a trace of the submodules that audits compare.")
    interval: PositiveInt = setting(1, "Steps between recorded steps; the first is always recorded.")


class GuardLoggingSection(Section):
    """Where a guard writes."""

    run_dir: str = setting(..., "Folder of events and incident reports; created if absent.")
    interval: PositiveInt = setting(100, "Steps between reports of bounds.")


class GuardSettings(Section):
    """The whole file."""

    determinism: DeterminismSection = section(DeterminismSection)
    audit: GuardAuditSection = section(GuardAuditSection)
    sdc: GuardSdcSection = section(GuardSdcSection)
    trace: GuardTraceSection = section(GuardTraceSection)
    optimizer_hooks: list[HookSpec] = setting([], "What bounds gradients, in this order; empty: nothing.")
    logging: GuardLoggingSection
